// 8-bit codes for AVX-512 VNNI. Its instruction multiplies bytes of 0 to 255 by bytes of -128 to 127.
//
// So 128 is added to the codes of the weight, and 128 times the sum of the token's codes is subtracted at the end.
// With fewer than 2**16 codes an int32 holds these sums too: 255 * 128 * 65535 is below 2**31.
#include <immintrin.h>

#include "codes_block.h"

namespace qload::cpu {
namespace {

struct CodesVnni {
  static constexpr int kStep = 64;
  using Token = __m512i;
  using Row = __m512i;
  using Sums = __m512i;

  static Sums zero() { return _mm512_setzero_si512(); }
  static Token token(const int8_t* at) { return _mm512_loadu_si512(at); }
  static Row row(const int8_t* at) { return _mm512_xor_si512(token(at), _mm512_set1_epi8(-128)); }
  static Sums plus(Sums sums, Token token, Row row) { return _mm512_dpbusd_epi32(sums, row, token); }
  static int32_t across(Sums sums, int32_t of_token) {
    return _mm512_reduce_add_epi32(sums) - 128 * of_token;
  }
};

}  // namespace

void code_dots_vnni(const CodeBlock& in, int tokens, int rows) { code_dots<CodesVnni>(in, tokens, rows); }

}  // namespace qload::cpu
