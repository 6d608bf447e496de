// One token of integers, where its groups are such (fixed.h), times panels of 4 bits; other groups as float32. `How` has
// the registers of an instruction set, and multiplies a group of integers.
#pragma once

#include "ahead.h"
#include "fixed.h"
#include "panels.h"

namespace qload::cpu {
namespace {

/// A group's sums of differences times inputs that are not whole.
template <class S>
void group_in_floats(const Panels& weight, int64_t group, const float* x, typename S::Floats (&out)[kParts<S>]) {
  const Nibbles<S> codes(weight, group);
  const uint32_t* words = weight.words + group * (weight.run / kFixedRows) * kPanel;
#pragma GCC unroll 2
  for (auto& sum : out) sum = S::all(0);
  for (int64_t row = 0; row < weight.run; row += kFixedRows, words += kPanel, x += kFixedRows) {
    ask_ahead(words);
#pragma GCC unroll 2
    for (int half = 0; half < kParts<S>; ++half) {
      const auto here = codes.line(S::load(words + half * S::kLanes), half);
#pragma GCC unroll 8
      for (int i = 0; i < kFixedRows; ++i)
        out[half] = S::plus_product(out[half], S::all(x[i]), codes.value(here, i, half));
    }
  }
#pragma GCC unroll 2
  for (auto& sum : out) sum = S::times(sum, S::all(1 / codes.kFactor));
}

template <class How>
void multiply_fixed(const Panels& weight, const FixedToken& in, const Outputs& out, int64_t begin, int64_t end) {
  using S = typename How::S;
  const int64_t groups = weight.rows / weight.run, words = weight.run / kFixedRows * kFixedWords;
  for (int64_t panel = begin; panel < end; ++panel) {
    alignas(64) float totals[kPanel] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t group = panel * groups + g;
      typename S::Floats sums[kParts<S>];
      if (in.groups[g].whole)
        How::group(weight, group, in.bytes + g * words, in.groups[g], sums);
      else
        group_in_floats<S>(weight, group, in.x + g * weight.run, sums);
#pragma GCC unroll 2
      for (int half = 0; half < kParts<S>; ++half) {
        const int at = half * S::kLanes;
        const auto scale = S::read(weight.scales, weight.scale_type, group * kPanel + at);
        S::store(totals + at, S::plus_product(S::load(totals + at), scale, sums[half]));
      }
    }
    finish<S>(out, {nullptr, 1, 0}, panel, totals);
  }
}

}  // namespace
}  // namespace qload::cpu
