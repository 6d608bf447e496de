// Products for AVX-512.
#include "lanes_avx512.h"
#include "panels.h"
#include "rows.h"
#include "rows_avx512.h"
#include "scales.h"
#include "widen.h"

namespace qload::cpu {
namespace {

bool few_rows(const Meaning& m, Float, FewRows& way) { return few_floats(m, way); }

}  // namespace

extern const Products kAvx512Products;
const Products kAvx512Products{widen<LanesAvx512>, multiply<LanesAvx512>, scratch_of, dots<LanesAvx512>,
                               nullptr, finish<LanesAvx512>, nullptr, nullptr, spell_scales, few_rows};

}  // namespace qload::cpu
