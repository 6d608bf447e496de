// The product of AVX-512 VNNI with panels; for all others it uses products_avx512.cpp.
#include "fixed_vnni.h"

namespace qload::cpu {

void multiply_fixed_vnni(const Panels& weight, const FixedToken& token, const Outputs& out, int64_t begin,
                         int64_t end) {
  multiply_fixed<FixedVnni>(weight, token, out, begin, end);
}

}  // namespace qload::cpu
