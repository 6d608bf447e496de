// Products for AVX-512 with BF16.
#include "lanes_avx512.h"
#include "pairs.h"
#include "panels.h"
#include "rows_avx512.h"
#include "rows_bf16.h"
#include "rows_halves.h"
#include "rows_rounded.h"
#include "rows_stored.h"
#include "widen.h"

namespace qload::cpu {
namespace {

template <class Codes, int P>
void multiply_in_pairs(const Panels& weight, const PairedTokens& tokens, const Outputs& out, int64_t begin, int64_t end,
                       float* scratch) {
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint32_t* x = tokens.x;
    for (int64_t m = 0; m < tokens.count; m += kPairTokens) {
      const int block = paired(tokens.count - m);
      multiply_pairs<Codes, P>(block, weight, panel, x, scratch + m * kPanel);
      x += block * P * weight.rows / 2;
    }
    finish<LanesAvx512>(out, {nullptr, tokens.count, tokens.first}, panel, scratch);
  }
}

void multiply_in_pairs(const Panels& weight, const PairedTokens& tokens, const Outputs& out, int64_t begin, int64_t end,
                       float* scratch) {
  const bool one = tokens.parts == 1;
  const auto way = weight.bits == 8 ? one ? multiply_in_pairs<BytesInPairs, 1> : multiply_in_pairs<BytesInPairs, 2>
                   : one            ? multiply_in_pairs<NibblesInPairs, 1>
                                    : multiply_in_pairs<NibblesInPairs, 2>;
  way(weight, tokens, out, begin, end, scratch);
}

template <int Count>
bool pairs(const Meaning& m, FewRows& way) {
  return takes_stored<Count>(m, way) || takes<SixteenPairs<Count>>(m, way) || takes<BfloatPairs<Count>>(m, way);
}

bool few_rows(const Meaning& m, Float type, FewRows& way) {
  if (type == Float::kBfloat16 && (pairs<1>(m, way) || takes<RoundedValues>(m, way))) return true;
  if (type == Float::kFloat16 && pairs<2>(m, way)) return true;
  return few_floats(m, type, way);
}

}  // namespace

extern const Products kBf16Products;
const Products kBf16Products{widen<LanesAvx512>, multiply<LanesAvx512>, scratch_of,
                             dots_avx512<FloatDots>, dots_avx512<HalfDots>, finish<LanesAvx512>, multiply_in_pairs,
                             multiply_fixed_vnni, scales_avx512, spell_either, few_rows, kMostFewRows};

}  // namespace qload::cpu
