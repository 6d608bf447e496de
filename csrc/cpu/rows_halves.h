// Products with rows of bfloat16, as rows.h has them of floats: lanes are pairs of columns, of which an instruction adds
// both products to a float32; six tokens and four rows are 24 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int kRowsOfHalves = 4, kTokensOfHalves = 6;  // at once

/// The sums over lanes of four registers.
inline __m128 across_four(const __m512* sums) {
  const auto both = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const __m512d two = _mm512_castps_pd(both(sums[0], sums[1])), others = _mm512_castps_pd(both(sums[2], sums[3]));
  const __m512 four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(two, others)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(two, others)));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

template <int T>
void dots_of_some(const uint16_t* tile, int64_t pitch, const uint16_t* x, int64_t x_pitch, int64_t columns,
                    float* totals) {
  __m512 sums[T][kRowsOfHalves];
#pragma GCC unroll 8
  for (auto& of : sums)
#pragma GCC unroll 4
    for (auto& sum : of) sum = _mm512_setzero_ps();
  for (int64_t c = 0; c < columns; c += 32) {
    __m512bh row[kRowsOfHalves];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsOfHalves; ++r) row[r] = (__m512bh)_mm512_loadu_si512(tile + r * pitch + c);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const auto input = (__m512bh)_mm512_loadu_si512(x + t * x_pitch + c);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsOfHalves; ++r) sums[t][r] = _mm512_dpbf16_ps(sums[t][r], input, row[r]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    float* const total = totals + t * kPanel;
    _mm_storeu_ps(total, _mm_add_ps(_mm_loadu_ps(total), across_four(sums[t])));
  }
}

/// totals (tokens, 16) += x (tokens, columns) times 16 rows; columns a multiple of 32.
inline void dots_of_halves(const uint16_t* tile, int64_t pitch, const uint16_t* x, int64_t x_pitch, int64_t tokens,
                           int64_t columns, float* totals) {
  constexpr decltype(&dots_of_some<1>) ways[] = {dots_of_some<1>, dots_of_some<2>, dots_of_some<3>,
                                                 dots_of_some<4>, dots_of_some<5>, dots_of_some<6>};
  for (int64_t m = 0; m < tokens; m += kTokensOfHalves) {
    const auto way = ways[(tokens - m < kTokensOfHalves ? tokens - m : kTokensOfHalves) - 1];
    for (int r = 0; r < kPanel; r += kRowsOfHalves)
      way(tile + r * pitch, pitch, x + m * x_pitch, x_pitch, columns, totals + m * kPanel + r);
  }
}

}  // namespace
}  // namespace qload::cpu
