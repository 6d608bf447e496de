// Offsets of panels, subtracted from the sums of products with codes.
//
//   totals[t, n] -= sum over g of offset[g, n] * sums[t, g]       sums of x by group
//
// Offsets that are subtracted from codes are multiplied by the scale first. Some groups at once become floats in the
// first-level cache, for all tokens. Products and sums are in float32, in one order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int64_t kGroupsAtOnce = 64;
constexpr int kOffsetTokens = 4;  // with sums in registers

/// Subtracts the products of T tokens with `count` groups, a multiple of `kGroupSums`; `table`: (count, 16).
template <class S, int T>
void subtract_products(const float* table, int64_t count, const float* sums, int64_t pitch, float* totals) {
  using Floats = typename S::Floats;
  constexpr int kPart = kPanel / S::kLanes, kSets = T == 1 ? kGroupSums : 1;  // independent sums, to hide latency
  Floats products[kSets][T][kPart];
  for (auto& set : products)
    for (auto& of : set)
      for (auto& sum : of) sum = S::all(0);
  for (int64_t g = 0; g < count; g += kSets)
#pragma GCC unroll 4
    for (int set = 0; set < kSets; ++set)
#pragma GCC unroll 4
      for (int part = 0; part < kPart; ++part) {
        const Floats offset = S::load(table + (g + set) * kPanel + part * S::kLanes);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
          products[set][t][part] = S::plus_product(products[set][t][part], S::all(sums[t * pitch + g + set]), offset);
      }
  for (int t = 0; t < T; ++t)
    for (int part = 0; part < kPart; ++part) {
      for (int set = 1; set < kSets; ++set) products[0][t][part] = S::plus(products[0][t][part], products[set][t][part]);
      float* const total = totals + t * kPanel + part * S::kLanes;
      S::store(total, S::minus(S::load(total), products[0][t][part]));
    }
}

/// Subtracts the offsets of a panel from `totals`, (tokens, 16).
template <class S>
void subtract_offsets(const GroupSums& of, const Tokens& tokens, int64_t panel, float* totals) {
  const Panels& weight = *of.weight;
  const int64_t groups = weight.rows / weight.run;
  alignas(64) float table[kGroupsAtOnce * kPanel];
  for (int64_t first = 0; first < groups; first += kGroupsAtOnce) {
    const int64_t some = std::min(kGroupsAtOnce, groups - first), count = padded_groups(some);
    for (int64_t g = 0; g < some; ++g)
      for (int at = 0; at < kPanel; at += S::kLanes) {
        const int64_t from = (panel * groups + first + g) * kPanel + at;
        auto offset = S::read(weight.offsets, weight.scale_type, from);
        if (weight.of_codes) offset = S::times(offset, S::read(weight.scales, weight.scale_type, from));
        S::store(table + g * kPanel + at, offset);
      }
    std::memset(table + some * kPanel, 0, static_cast<size_t>((count - some) * kPanel) * sizeof(float));
    const float* const sums = of.sums + tokens.first * of.pitch + first;
    int64_t m = 0;
    for (; m + kOffsetTokens <= tokens.count; m += kOffsetTokens)
      subtract_products<S, kOffsetTokens>(table, count, sums + m * of.pitch, of.pitch, totals + m * kPanel);
    for (; m < tokens.count; ++m)
      subtract_products<S, 1>(table, count, sums + m * of.pitch, of.pitch, totals + m * kPanel);
  }
}

}  // namespace
}  // namespace qload::cpu
