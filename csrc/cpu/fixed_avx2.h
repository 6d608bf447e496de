// Groups of integers (fixed.h) times panels of 4 bits, in registers of AVX2. One instruction multiplies 32 codes by
// as many bytes of inputs, and adds neighbours. A mask, or a shift and a mask, extracts 32 codes from 8 words; then
// 32 products of a byte take two instructions, 64 codes 12. Sums of 16 bits are widened to 32 after four words.
#pragma once

#include "fixed_panels.h"
#include "lanes_avx2.h"

namespace qload::cpu {
namespace {

struct FixedAvx2 {
  using S = LanesAvx2;
  static constexpr int kAtOnce = 4;  // words with sums that fit 16 bits: 2 * 2 * 15 * 128 each

  /// The sums of a group's differences times inputs, without the unit.
  static void group(const Panels& weight, int64_t at, const uint32_t* bytes, const FixedGroup& inputs,
                      __m256 (&out)[kParts<S>]) {
    constexpr int kHalves = kParts<S>;
    const int64_t lines = weight.run / kFixedRows;
    const uint32_t* words = weight.words + at * lines * kPanel;
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i sums[kFixedParts][kHalves];
#pragma GCC unroll 3
    for (auto& part : sums)
#pragma GCC unroll 2
      for (auto& sum : part) sum = _mm256_setzero_si256();
    for (int64_t line = 0; line < lines;) {
      const int64_t stop = lines - line < kAtOnce ? lines : line + kAtOnce;
      __m256i narrow[kFixedParts][kHalves];
#pragma GCC unroll 3
      for (auto& part : narrow)
#pragma GCC unroll 2
        for (auto& sum : part) sum = _mm256_setzero_si256();
      for (; line < stop; ++line, words += kPanel, bytes += kFixedWords) {
        ask_ahead(words);
        __m256i even[kHalves], odd[kHalves];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) {
          const __m256i word = S::load(words + half * S::kLanes);
          even[half] = S::both(word, mask);
          odd[half] = S::both(S::right(word, 4), mask);
        }
#pragma GCC unroll 3
        for (int part = 0; part < kFixedParts; ++part) {
          const __m256i first = S::words(bytes[2 * part]), second = S::words(bytes[2 * part + 1]);
#pragma GCC unroll 2
          for (int half = 0; half < kHalves; ++half) {
            __m256i& sum = narrow[part][half];
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(even[half], first));
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(odd[half], second));
          }
        }
      }
#pragma GCC unroll 3
      for (int part = 0; part < kFixedParts; ++part)
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half)
          sums[part][half] =
              _mm256_add_epi32(sums[part][half], _mm256_madd_epi16(narrow[part][half], _mm256_set1_epi16(1)));
    }
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      const __m256i zero = zeros_of<S>(weight, at, half);
      __m256 sum = S::all(0);
#pragma GCC unroll 3
      for (int part = 0; part < kFixedParts; ++part) {
        const __m256i zeros = _mm256_mullo_epi32(zero, _mm256_set1_epi32(inputs.sums[part]));
        const __m256 whole = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[part][half], zeros));
        sum = S::plus_product(whole, sum, S::all(256));
      }
      out[half] = S::times(sum, S::all(inputs.unit));
    }
  }
};

}  // namespace
}  // namespace qload::cpu
