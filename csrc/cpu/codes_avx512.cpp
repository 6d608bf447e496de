// 8-bit codes widened to 16 bits for AVX-512, as for AVX2.
#include <immintrin.h>

#include "codes_block.h"

namespace qload::cpu {
namespace {

struct CodesAvx512 {
  static constexpr int kStep = 32;
  using Token = __m512i;
  using Row = __m512i;
  using Sums = __m512i;

  static Sums zero() { return _mm512_setzero_si512(); }
  static Token token(const int8_t* at) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  static Row row(const int8_t* at) { return token(at); }
  static Sums plus(Sums sums, Token token, Row row) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(token, row));
  }
  static int32_t across(Sums sums, int32_t) { return _mm512_reduce_add_epi32(sums); }
};

}  // namespace

void code_dots_avx512(const CodeBlock& in, int tokens, int rows) { code_dots<CodesAvx512>(in, tokens, rows); }

}  // namespace qload::cpu
