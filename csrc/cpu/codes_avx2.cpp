// 8-bit codes widened to 16 bits for AVX2: one instruction adds two products into an int32.
#include <immintrin.h>

#include "codes_block.h"

namespace qload::cpu {
namespace {

struct CodesAvx2 {
  static constexpr int kStep = 16;
  using Token = __m256i;
  using Row = __m256i;
  using Sums = __m256i;

  static Sums zero() { return _mm256_setzero_si256(); }
  static Token token(const int8_t* at) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static Row row(const int8_t* at) { return token(at); }
  static Sums plus(Sums sums, Token token, Row row) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(token, row));
  }
  static int32_t across(Sums sums, int32_t) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
  }
};

}  // namespace

void code_dots_avx2(const CodeBlock& in, int tokens, int rows) { code_dots<CodesAvx2>(in, tokens, rows); }

}  // namespace qload::cpu
