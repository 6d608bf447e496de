// One token times panels of 4 bits: whole groups (fixed.h) as integers, other groups as float32. `How` has the
// registers of an instruction set and the product of a group of integers.
#pragma once

#include "ahead.h"
#include "fixed.h"
#include "panels.h"

namespace qload::cpu {
namespace {

/// The sums of a group's differences times inputs, for a group that is not whole.
template <class S>
void group_in_floats(const Panels& weight, int64_t group, const float* x, typename S::Floats (&out)[kParts<S>]) {
  constexpr int kSets = 4;  // independent sums, to hide the latency of an addition
  const Nibbles<S> codes(weight, group);
  typename S::Floats sums[kSets][kParts<S>];
  const uint32_t* words = weight.words + group * (weight.run / kFixedRows) * kPanel;
#pragma GCC unroll 4
  for (auto& set : sums)
#pragma GCC unroll 2
    for (auto& sum : set) sum = S::all(0);
  for (int64_t row = 0; row < weight.run; row += kFixedRows, words += kPanel, x += kFixedRows) {
    ask_ahead(words);
#pragma GCC unroll 2
    for (int half = 0; half < kParts<S>; ++half) {
      const auto here = codes.line(S::load(words + half * S::kLanes), half);
#pragma GCC unroll 8
      for (int i = 0; i < kFixedRows; ++i)
        sums[i % kSets][half] = S::plus_product(sums[i % kSets][half], S::all(x[i]), codes.value(here, i, half));
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < kParts<S>; ++half) {
    const auto sum = S::plus(S::plus(sums[0][half], sums[1][half]), S::plus(sums[2][half], sums[3][half]));
    out[half] = S::times(sum, S::all(1 / codes.kFactor));
  }
}

template <class How>
void multiply_fixed(const Panels& weight, const FixedToken& in, const Outputs& out, int64_t begin, int64_t end) {
  using S = typename How::S;
  const int64_t groups = weight.rows / weight.run, words = weight.run / kFixedRows * kFixedWords;
  for (int64_t panel = begin; panel < end; ++panel) {
    typename S::Floats total[kParts<S>];
#pragma GCC unroll 2
    for (auto& sum : total) sum = S::all(0);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t group = panel * groups + g;
      typename S::Floats sums[kParts<S>];
      if (in.groups[g].whole)
        How::group(weight, group, in.bytes + g * words, in.groups[g], sums);
      else
        group_in_floats<S>(weight, group, in.x + g * weight.run, sums);
#pragma GCC unroll 2
      for (int half = 0; half < kParts<S>; ++half) {
        const auto scale = S::read(weight.scales, weight.scale_type, group * kPanel + half * S::kLanes);
        total[half] = S::plus_product(total[half], scale, sums[half]);
      }
    }
    alignas(64) float totals[kPanel];
#pragma GCC unroll 2
    for (int half = 0; half < kParts<S>; ++half) S::store(totals + half * S::kLanes, total[half]);
    finish<S>(out, {nullptr, 1, 0}, panel, totals);
  }
}

}  // namespace
}  // namespace qload::cpu
