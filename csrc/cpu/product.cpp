// Products of tokens with weights: inputs in the order of a weight's rows, panels divided among threads.
#include "product.h"

#include <algorithm>
#include <vector>

#include "aligned.h"
#include "fixed.h"
#include "gathered.h"
#include "parallel.h"
#include "product_tiles.h"
#include "rows_many.h"
#include "upper.h"

namespace qload::cpu {
namespace {


/// Whether codes of 4 bits without their zero points have 5 bits.
bool is_narrow(const Panels& weight, int64_t panels) {
  if (weight.bits != 4) return false;
  const int64_t count = weight.zeros ? panels * (weight.rows / weight.run) * kPanel : 0;
  uint8_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, weight.zeros[i]);
  return most <= 16;
}

void multiply_in_pairs(const Kernels& kernels, const Panels& weight, const Inputs& inputs, const Outputs& outputs,
                       int64_t panels, int threads) {
  Gathered gathered(kernels, weight, inputs);
  const int parts = inputs.type == Float::kBfloat16 ? 1 : 2;
  const int64_t most = (std::min(kTokens, inputs.M) + kPairTokens - 1) / kPairTokens * kPairTokens;
  const auto x = aligned<uint32_t>(most * parts * weight.rows / 2);
  for (int64_t first = 0; first < inputs.M; first += kTokens) {
    const PairedTokens tokens{x.get(), parts, std::min(kTokens, inputs.M - first), first};
    gathered.fill_pairs(first, tokens.count, weight.rows, parts, x.get());
    const int64_t least = kWork / std::max<int64_t>(1, weight.rows * kPanel * tokens.count) + 1;
    parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
      const auto scratch = aligned<float>(most * kPanel);
      kernels.products->multiply_in_pairs(weight, tokens, outputs, begin, end, scratch.get());
    });
  }
}

/// Multiplies one token of a type with whole numbers in most groups.
void multiply_fixed(const Kernels& kernels, const Panels& weight, const Inputs& inputs, const Outputs& outputs,
                    int64_t panels, int threads) {
  const auto x = aligned<float>(weight.rows);
  Gathered(kernels, weight, inputs).fill(0, 1, weight.rows, x.get());
  const FixedInputs fixed(x.get(), weight.rows, weight.run);
  const int64_t least = kWork / std::max<int64_t>(1, weight.rows * kPanel) + 1;
  parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
    kernels.products->multiply_fixed(weight, fixed.token(), outputs, begin, end);
  });
}

/// The sum of a group's inputs; `rows` is a multiple of 4.
float sum_of(const float* x, int64_t rows) {
  constexpr int kLanes = 4;
  float sums[kLanes] = {};
  for (int64_t row = 0; row < rows; row += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[row + lane];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// Sums the inputs of each token by group into rows of `pitch`, zero-padded.
Aligned<float> sum_groups(const Kernels& kernels, const Panels& weight, const Inputs& inputs, int64_t pitch,
                          int threads) {
  const Gathered gathered(kernels, weight, inputs);
  const int64_t groups = weight.rows / weight.run;
  auto sums = aligned<float>(inputs.M * pitch);
  parallel_for(inputs.M, kInputsOfThread / weight.rows + 1, threads, [&](int64_t begin, int64_t end) {
    auto row = gathered.room();
    const auto token = aligned<float>(weight.rows);
    for (int64_t m = begin; m < end; ++m) {
      gathered.one(m, weight.rows, token.get(), 1, row.data());
      float* const to = sums.get() + m * pitch;
      for (int64_t g = 0; g < pitch; ++g) to[g] = g < groups ? sum_of(token.get() + g * weight.run, weight.run) : 0;
    }
  });
  return sums;
}

void multiply_panels(const Kernels& kernels, const Panels& weight, const Inputs& inputs, const Outputs& outputs,
                     int64_t panels, int few, int threads) {
  const int64_t most = std::min(kTokens, inputs.M);
  if (kernels.products->multiply_fixed && weight.narrow && inputs.type != Float::kFloat32 && inputs.M == 1 && few)
    return multiply_fixed(kernels, weight, inputs, outputs, panels, threads);
  const bool whole = weight.narrow || (weight.bits == 8 && weight.run % (2 * kPairs) == 0);  // whole pairs of 8 rows
  if (whole && are_in_tiles(kernels, weight, inputs))
    return multiply_in_tiles(kernels, weight, inputs, outputs, panels, threads);
  if (kernels.products->multiply_in_pairs && whole && inputs.type != Float::kFloat32)
    return multiply_in_pairs(kernels, weight, inputs, outputs, panels, threads);
  Gathered gathered(kernels, weight, inputs);
  const auto x = aligned<float>(most * weight.rows);
  for (int64_t first = 0; first < inputs.M; first += kTokens) {
    const Tokens tokens{x.get(), std::min(kTokens, inputs.M - first), first};
    gathered.fill(first, tokens.count, weight.rows, x.get());
    const int64_t least = kWork / std::max<int64_t>(1, weight.rows * kPanel * tokens.count) + 1;
    parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
      const auto scratch = aligned<float>(kernels.products->scratch_of(tokens.count));
      kernels.products->multiply(weight, tokens, outputs, begin, end, few, scratch.get());
    });
  }
}

}  // namespace

void multiply(const Kernels& kernels, const Panels& panels_of, const Inputs& inputs, const Outputs& outputs, int few,
              int threads) {
  const int64_t panels = (outputs.N + kPanel - 1) / kPanel;
  if (!inputs.M || !panels) return;
  Panels weight = panels_of;
  weight.narrow = is_narrow(weight, panels);
  if (!weight.offsets) return multiply_panels(kernels, weight, inputs, outputs, panels, few, threads);
  const int64_t pitch = padded_groups(weight.rows / weight.run);
  const auto sums = sum_groups(kernels, weight, inputs, pitch, threads);
  const GroupSums all{&weight, sums.get(), pitch};
  Outputs out = outputs;
  out.sums = &all;
  multiply_panels(kernels, weight, inputs, out, panels, few, threads);
}

namespace {

/// Writes a token's inputs in the order of blocks, zero-padded; its registers are `step` apart.
void in_blocks(const FewRows& way, const float* row, int64_t step, uint32_t* to) {
  const auto input = [&](int64_t at) { return at < way.columns ? row[at] : 0.0f; };
  const int64_t codes = way.inputs ? 2 * way.lanes : way.lanes;  // of a register
  for (int64_t c = 0; c < way.columns; c += way.block)
    for (int64_t i = 0; i < way.block; i += codes, to += std::max(way.inputs, 1) * step)
      for (int64_t lane = 0; lane < way.lanes; ++lane) {
        if (!way.inputs) {
          to[lane] = bits_of(input(c + way.order[i + lane]));
          continue;
        }
        float first = input(c + way.order[i + 2 * lane]), second = input(c + way.order[i + 2 * lane + 1]);
        for (int part = 0; part < way.inputs; ++part) to[part * step + lane] = pair_of(first, second);
      }
}

void multiply_few_rows(const Kernels& kernels, const FewRows& way, const Values& values, const ByteScales& scales,
                       const uint8_t* codes, int64_t row_bytes, const Inputs& in, const Outputs& out, int threads) {
  const int64_t panels = (out.N + kPanel - 1) / kPanel, words = way.words();
  const Tokens tokens{nullptr, in.M, 0};
  std::vector<float> row(static_cast<size_t>(in.K));
  const auto x = aligned<uint32_t>(in.M * words);
  for (int64_t first = 0, some; first < in.M; first += some) {
    some = way.together(in.M - first);
    for (int64_t t = 0; t < some; ++t) {
      widen_one(kernels, in, first + t, row.data(), 1);
      in_blocks(way, row.data(), some * way.lanes, x.get() + first * words + t * way.lanes);
    }
  }
  const int64_t least = kWork / std::max<int64_t>(1, in.K * kPanel * in.M) + 1;
  parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
    RowsMeant meant(kernels, values, scales, !way.stored);
    for (int64_t panel = begin; panel < end; ++panel) {
      float totals[kMostFewRows * kPanel] = {};
      const int count = static_cast<int>(std::min<int64_t>(kPanel, out.N - panel * kPanel));
      RowsOfCodes rows{meant.of(panel * kPanel, count), codes + panel * kPanel * row_bytes, row_bytes, in.K, count,
                       way.stored ? &scales : nullptr, {}};
      for (int r = 0; way.stored && r < count; ++r)
        rows.scales[r] = scales.bytes + meant.first_scale(panel * kPanel + r);
      for (int64_t m = 0, some; m < in.M; m += some) {
        some = way.together(in.M - m);
        way.dots(rows, x.get() + m * words, static_cast<int>(some), totals + m * kPanel);
      }
      kernels.products->finish(out, tokens, panel, totals);
    }
  });
}

}  // namespace

void multiply_rows(const Kernels& kernels, const Values& values, const ByteScales& scales, const uint8_t* codes,
                   int64_t row_bytes, const Inputs& in, const Outputs& out, int threads) {
  if (!in.M || !out.N) return;
  const auto few_rows = kernels.products->few_rows;
  FewRows way{in.K, &scales, false, 0, 0, 0, 0, {}, nullptr};
  if (are_in_tiles(kernels, values, in))
    return multiply_rows_in_tiles(kernels, values, scales, codes, row_bytes, in, out, threads);
  if (in.M <= kernels.products->most_few && few_rows && few_rows(values.meaning, in.type, way))
    return multiply_few_rows(kernels, way, values, scales, codes, row_bytes, in, out, threads);
  const bool halves = kernels.products->dots_of_halves && in.type == Float::kBfloat16 && in.M > kMostFewRows;
  const auto many = halves ? multiply_many_rows<InHalves> : multiply_many_rows<InFloats>;
  many(kernels, values, scales, codes, row_bytes, in, out, threads);
}

}  // namespace qload::cpu
