// Products of bfloat16 or float16 with panels, by an instruction that multiplies two pairs of bfloat16 and adds both
// products to a float32.
//
// Differences of codes and zero points have 5 bits, for 8-bit codes 9 bits with the sign; each is exact in bfloat16.
// Pair p of 8 rows has rows p and p + 4.
//
//   4 bits   A mask extracts nibbles 0, 2, 4 and 6 of a word as bytes, and one subtraction subtracts four zero points.
//            A shuffle with 5-bit indices, one in each half, looks up the values of rows 0 and 4; after a shift, those
//            of rows 2 and 6. The odd nibbles are alike.
//   8 bits   A byte of two words becomes a float32 without its zero point, as in panels.h. The low halves of both
//            floats are 0, so their high halves are the pair.
//
//   x   uint32  (rows/8, 4, parts, T)   T tokens: the inputs of a pair, the first in the low half
//
// A bfloat16 is one part, a float16 the sum of two. Products are exact and sums are float32, except below 2**-126:
// such inputs and sums count as 0.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ahead.h"
#include "kernels.h"
#include "lanes_avx512.h"
#include "panels.h"

namespace qload::cpu {
namespace {

constexpr int kPairRows = 8;  // rows for each step

struct Differences {  // table from 5-bit two's complement to bfloat16
  alignas(64) uint16_t half[32];
  Differences() {
    for (int code = 0; code < 32; ++code) {
      const float value = static_cast<float>(code < 16 ? code : code - 32);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      half[code] = static_cast<uint16_t>(bits >> 16);
    }
  }
};

/// The pairs of a group of 4-bit codes, from one register for 8 rows.
struct NibblesInPairs {
  static constexpr int kRegisters = 1;

  __m512i table, mask = _mm512_set1_epi32(0x0F0F0F0F), zero;

  NibblesInPairs(const Panels& weight, int64_t group)
      : zero(LanesAvx512::four_times(zeros_of<LanesAvx512>(weight, group, 0))) {
    static const Differences differences;
    table = _mm512_load_si512(differences.half);
  }

  void pairs(const uint32_t* words, __m512i* to) const {
    const __m512i word = LanesAvx512::load(words);
    const __m512i even = _mm512_sub_epi8(_mm512_and_si512(word, mask), zero);
    const __m512i odd = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi32(word, 4), mask), zero);
    const __m512i places[kPairs] = {even, odd, _mm512_srli_epi32(even, 8), _mm512_srli_epi32(odd, 8)};
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair) to[pair] = _mm512_permutexvar_epi16(places[pair], table);
  }
};

/// The pairs of a group of 8-bit codes, from two registers for 8 rows.
struct BytesInPairs {
  static constexpr int kRegisters = 2;

  Wide<LanesAvx512, 8> codes;

  BytesInPairs(const Panels& weight, int64_t group) : codes(weight, group) {}

  void pairs(const uint32_t* words, __m512i* to) const {
    const __m512i first = LanesAvx512::load(words), second = LanesAvx512::load(words + kPanel);
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair) {
      const __m512i low = _mm512_castps_si512(codes.value(first, pair, 0));
      const __m512i high = _mm512_castps_si512(codes.value(second, pair, 0));
      to[pair] = _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
    }
  }
};

/// sum + inputs (of a pair) times values
inline __m512 plus_pair(__m512 sum, uint32_t input, __m512i values) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(input)), (__m512bh)values);
}

/// Multiplies T tokens of P parts with a panel; `totals`: T x 16.
template <class Codes, int T, int P>
void multiply_pairs(const Panels& weight, int64_t panel, const uint32_t* x, float* totals) {
  constexpr int kSets = T >= 8 ? 1 : T >= 4 ? 2 : kPairs;  // independent sums, to hide latency
  constexpr int64_t kWords = Codes::kRegisters * kPanel;
  const int64_t groups = weight.rows / weight.run, lines = weight.run / kPairRows;
  const uint32_t* words = weight.words + panel * (weight.rows / kPairRows) * kWords;
  for (int t = 0; t < T; ++t) _mm512_storeu_ps(totals + t * kPanel, _mm512_setzero_ps());
  for (int64_t g = panel * groups; g < (panel + 1) * groups; ++g) {
    const Codes codes(weight, g);
    __m512 sums[kSets][T];
#pragma GCC unroll 4
    for (auto& set : sums)
#pragma GCC unroll 16
      for (auto& sum : set) sum = _mm512_setzero_ps();
    for (int64_t line = 0; line < lines; ++line, words += kWords, x += kPairs * P * T) {
#pragma GCC unroll 2
      for (int part = 0; part < Codes::kRegisters; ++part) ask_ahead(words + part * kPanel);
      __m512i values[kPairs];
      codes.pairs(words, values);
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair)
#pragma GCC unroll 2
        for (int part = 0; part < P; ++part)
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) {
            __m512& sum = sums[pair % kSets][t];
            sum = plus_pair(sum, x[(pair * P + part) * T + t], values[pair]);
          }
    }
    const __m512 scale = LanesAvx512::read(weight.scales, weight.scale_type, g * kPanel);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int set = 1; set < kSets; ++set) sums[0][t] = _mm512_add_ps(sums[0][t], sums[set][t]);
      float* const total = totals + t * kPanel;
      _mm512_storeu_ps(total, _mm512_fmadd_ps(scale, sums[0][t], _mm512_loadu_ps(total)));
    }
  }
}

template <class Codes, int P>
void multiply_pairs(int tokens, const Panels& weight, int64_t panel, const uint32_t* x, float* totals) {
  switch (tokens) {
    case 1:
      return multiply_pairs<Codes, 1, P>(weight, panel, x, totals);
    case 2:
      return multiply_pairs<Codes, 2, P>(weight, panel, x, totals);
    case 4:
      return multiply_pairs<Codes, 4, P>(weight, panel, x, totals);
    case 8:
      return multiply_pairs<Codes, 8, P>(weight, panel, x, totals);
    case 12:
      return multiply_pairs<Codes, 12, P>(weight, panel, x, totals);
    default:
      return multiply_pairs<Codes, kPairTokens, P>(weight, panel, x, totals);
  }
}

}  // namespace
}  // namespace qload::cpu
