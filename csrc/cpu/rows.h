// Products with rows of floats: codes of any kind are decoded, some columns of 16 rows at a time.
//
//   totals[m, r] += sum over c of x[m, c] * tile[r, c]
//
// Lanes are columns, and lanes are added up at the end; three tokens and four rows take twelve registers.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int kRowsAtOnce = 4, kTokensAtOnce = 3;

template <class S, int T>
void dots_of(const float* tile, int64_t pitch, const float* x, int64_t x_pitch, int64_t columns, float* totals) {
  typename S::Floats sums[T][kRowsAtOnce];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < kRowsAtOnce; ++r) sums[t][r] = S::all(0);
  for (int64_t c = 0; c < columns; c += S::kLanes) {
    typename S::Floats row[kRowsAtOnce];
#pragma GCC unroll 16
    for (int r = 0; r < kRowsAtOnce; ++r) row[r] = S::load(tile + r * pitch + c);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const auto input = S::load(x + t * x_pitch + c);
#pragma GCC unroll 16
      for (int r = 0; r < kRowsAtOnce; ++r) sums[t][r] = S::plus_product(sums[t][r], input, row[r]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < kRowsAtOnce; ++r) totals[t * kPanel + r] += S::across(sums[t][r]);
}

template <class S>
void dots(const float* tile, int64_t pitch, const float* x, int64_t x_pitch, int64_t tokens, int64_t columns,
          float* totals) {
  for (int64_t m = 0; m < tokens; m += kTokensAtOnce)
    for (int r = 0; r < kPanel; r += kRowsAtOnce) {
      const auto way = tokens - m == 1 ? dots_of<S, 1> : tokens - m == 2 ? dots_of<S, 2> : dots_of<S, kTokensAtOnce>;
      way(tile + r * pitch, pitch, x + m * x_pitch, x_pitch, columns, totals + m * kPanel + r);
    }
}

}  // namespace
}  // namespace qload::cpu
