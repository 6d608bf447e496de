// Products with rows of floats, as in rows.h, in registers of AVX-512. Six tokens and four rows take 24 registers; the
// sums over lanes of four rows are computed together. `How` gives the type of a lane and the product of two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int kRowsOfDots = 4, kTokensOfDots = 6;  // in registers at once

struct FloatDots {
  using Element = float;
  using Register = __m512;
  static constexpr int64_t kColumns = 16;  // of one register
  static Register load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 plus_product(__m512 sum, Register x, Register row) { return _mm512_fmadd_ps(x, row, sum); }
};

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

template <class How, int T>
void dots_of_tokens(const typename How::Element* tile, int64_t pitch, const typename How::Element* x, int64_t x_pitch,
                    int64_t columns, float* totals) {
  __m512 sums[T][kRowsOfDots];
#pragma GCC unroll 8
  for (auto& of : sums)
#pragma GCC unroll 4
    for (auto& sum : of) sum = _mm512_setzero_ps();
  for (int64_t c = 0; c < columns; c += How::kColumns) {
    typename How::Register row[kRowsOfDots];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsOfDots; ++r) row[r] = How::load(tile + r * pitch + c);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const auto input = How::load(x + t * x_pitch + c);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsOfDots; ++r) sums[t][r] = How::plus_product(sums[t][r], input, row[r]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    float* const total = totals + t * kPanel;
    _mm_storeu_ps(total, _mm_add_ps(_mm_loadu_ps(total), across_four(sums[t])));
  }
}

/// totals (tokens, 16) += x (tokens, columns) times 16 rows; `columns` is a multiple of `How::kColumns`.
template <class How>
void dots_avx512(const typename How::Element* tile, int64_t pitch, const typename How::Element* x, int64_t x_pitch,
                 int64_t tokens, int64_t columns, float* totals) {
  constexpr decltype(&dots_of_tokens<How, 1>) ways[] = {dots_of_tokens<How, 1>, dots_of_tokens<How, 2>,
                                                        dots_of_tokens<How, 3>, dots_of_tokens<How, 4>,
                                                        dots_of_tokens<How, 5>, dots_of_tokens<How, 6>};
  for (int64_t m = 0; m < tokens; m += kTokensOfDots) {
    const auto way = ways[(tokens - m < kTokensOfDots ? tokens - m : kTokensOfDots) - 1];
    for (int r = 0; r < kPanel; r += kRowsOfDots)
      way(tile + r * pitch, pitch, x + m * x_pitch, x_pitch, columns, totals + m * kPanel + r);
  }
}

}  // namespace
}  // namespace qload::cpu
