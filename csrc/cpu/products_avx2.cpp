// Products for AVX2, FMA and F16C.
#include "fixed_avx2.h"
#include "lanes_avx2.h"
#include "panels.h"
#include "rows.h"
#include "rows_avx2.h"
#include "scales.h"
#include "widen.h"

namespace qload::cpu {

extern const Products kAvx2Products;
const Products kAvx2Products{widen<LanesAvx2>, multiply<LanesAvx2>, scratch_of, dots<LanesAvx2>, nullptr,
                             finish<LanesAvx2>, nullptr, multiply_fixed<FixedAvx2>, plain_scales, nullptr,
                             few_rows, kMostFewRows};

}  // namespace qload::cpu
