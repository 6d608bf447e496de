// Groups of integers (fixed.h) times panels of 4 bits, in registers of AVX-512 with VNNI. One instruction multiplies 64
// codes by as many bytes of inputs, and adds four neighbours to 32 bits; 128 codes take 9 instructions.
#pragma once

#include "fixed_panels.h"
#include "lanes_avx512.h"

namespace qload::cpu {
namespace {

struct FixedVnni {
  using S = LanesAvx512;

  /// The sums of a group's differences times inputs.
  static void group(const Panels& weight, int64_t at, const uint32_t* bytes, const FixedGroup& inputs,
                    __m512 (&out)[1]) {
    const int64_t lines = weight.run / kFixedRows;
    const uint32_t* words = weight.words + at * lines * kPanel;
    const __m512i mask = _mm512_set1_epi8(15), zero = zeros_of<S>(weight, at, 0);
    __m512i sums[kFixedWords];  // of even and odd rows separately, to hide the latency of an addition
#pragma GCC unroll 6
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    for (int64_t line = 0; line < lines; ++line, words += kPanel, bytes += kFixedWords) {
      ask_ahead(words);
      const __m512i word = S::load(words), even = S::both(word, mask), odd = S::both(S::right(word, 4), mask);
#pragma GCC unroll 6
      for (int i = 0; i < kFixedWords; ++i)
        sums[i] = _mm512_dpbusd_epi32(sums[i], i % 2 ? odd : even, S::words(bytes[i]));
    }
    __m512 sum = S::all(0);
#pragma GCC unroll 3
    for (int part = 0; part < kFixedParts; ++part) {
      const __m512i both = _mm512_add_epi32(sums[2 * part], sums[2 * part + 1]);
      const __m512i zeros = _mm512_mullo_epi32(zero, _mm512_set1_epi32(inputs.sums[part]));
      sum = S::plus_product(_mm512_cvtepi32_ps(_mm512_sub_epi32(both, zeros)), sum, S::all(256));
    }
    out[0] = S::times(sum, S::all(inputs.unit));
  }
};

}  // namespace
}  // namespace qload::cpu
