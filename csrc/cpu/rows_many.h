// Many tokens times rows of codes: some columns of some rows are decoded into memory that stays in the cache, and
// multiplied there with all tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "boxes.h"
#include "kernels.h"
#include "parallel.h"
#include "product.h"

namespace qload::cpu {
namespace {

constexpr int64_t kTokens = 256;      // tokens with inputs converted at once
constexpr int64_t kWork = 1 << 18;    // codes times tokens for each thread, at least
constexpr int64_t kBytesAtOnce = 2048;  // of a decoded row: columns of every width start at a byte
constexpr int64_t kPanelsAtOnce = 4, kManyTokens = 32;  // several panels share inputs from `kManyTokens` tokens on

/// Converts a token's inputs to float32, `step` apart.
inline void widen_one(const Kernels& kernels, const Inputs& in, int64_t token, float* to, int64_t step) {
  const int64_t size = in.type == Float::kFloat32 ? 4 : 2;
  const void* const x = static_cast<const uint8_t*>(in.x) + token * in.pitch * size;
  kernels.products->widen(x, in.type, in.K, to, step);
}

/// The meanings of up to 16 rows, with their scales as float32.
class RowsMeant {
 public:
  RowsMeant(const Kernels& kernels, const Values& values, const ByteScales& scales, bool spelled)
      : values_(values), bytes_(scales) {
    if (scales.kind == ByteScales::kNone || !spelled) return;
    scales_ = aligned<float>(kPanel * values.groups);
    spell_ = kernels.products->scales(scales);
  }

  const Meaning* of(int64_t first, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      rows_[r] = of_row(values_, first + r);
      if (!scales_) continue;
      float* const scales = scales_.get() + r * values_.groups;
      spell_(bytes_, first_scale(first + r), values_.groups, scales);
      rows_[r].scale = scales;
    }
    return rows_;
  }

  int64_t first_scale(int64_t row) const { return table_of(values_, row) * values_.groups; }

 private:
  const Values& values_;
  const ByteScales& bytes_;
  SpellScales spell_ = nullptr;
  Aligned<float> scales_;
  Meaning rows_[kPanel];
};

/// Rows and inputs as float32.
struct InFloats {
  using Element = float;
  static constexpr Float kType = Float::kFloat32;
  static constexpr int64_t kColumns = kColumnsOfLanes;  // columns are multiplied in multiples of this

  static void inputs(const Kernels& kernels, const Inputs& in, int64_t token, float* to) {
    widen_one(kernels, in, token, to, 1);
  }
  static auto dots(const Kernels& kernels) { return kernels.products->dots; }
};

/// Inputs of bfloat16 unchanged, and rows rounded to bfloat16 once, as in a weight dequantized to the type of x.
struct InHalves {
  using Element = uint16_t;
  static constexpr Float kType = Float::kBfloat16;
  static constexpr int64_t kColumns = 2 * kColumnsOfLanes;

  static void inputs(const Kernels&, const Inputs& in, int64_t token, uint16_t* to) {
    std::memcpy(to, static_cast<const uint16_t*>(in.x) + token * in.pitch, static_cast<size_t>(in.K) * 2);
  }
  static auto dots(const Kernels& kernels) { return kernels.products->dots_of_halves; }
};

/// Decodes columns [begin, end) of some rows, `pitch` apart, with zeros up to a multiple of `E::kColumns`.
template <class E>
void spell(const Kernels& kernels, const RowsOfCodes& rows, int64_t begin, int64_t end, typename E::Element* tile,
           int64_t pitch) {
  const auto in_registers = kernels.products->spell;
  if (in_registers && in_registers(rows, begin, end, E::kType, tile, pitch)) return;
  for (int r = 0; r < rows.count; ++r) {
    typename E::Element* const to = tile + r * pitch;
    const uint8_t* const row = rows.codes + r * rows.row_bytes;
    kernels.expand(rows.meaning[r], row + begin * rows.meaning[r].bits / 8, begin, end, to - begin, false);
    for (int64_t i = end - begin; i % E::kColumns; ++i) to[i] = 0;
  }
}

/// Multiplies some tokens, with inputs `x` at `pitch`, by panels [begin, end).
template <class E>
void multiply_spelled(const Kernels& kernels, const Values& values, const ByteScales& scales, const uint8_t* codes,
                      int64_t row_bytes, const typename E::Element* x, int64_t pitch, const Tokens& tokens,
                      const Outputs& out, int64_t K, int64_t begin, int64_t end) {
  using Element = typename E::Element;
  constexpr int64_t kAtOnce = kBytesAtOnce / sizeof(Element);
  const int64_t several = tokens.count > kManyTokens ? kPanelsAtOnce : 1, sums = tokens.count * kPanel;
  const auto tile = aligned<Element>(kPanel * kAtOnce);
  std::fill_n(tile.get(), kPanel * kAtOnce, Element{0});
  std::vector<float> totals(static_cast<size_t>(several * sums));
  std::vector<RowsMeant> meant;
  for (int64_t i = 0; i < several; ++i) meant.emplace_back(kernels, values, scales, true);
  const auto rows_of = [&](int64_t panel) { return std::min<int64_t>(kPanel, out.N - panel * kPanel); };
  for (int64_t first = begin; first < end; first += several) {
    const int64_t last = std::min(first + several, end);
    const Meaning* meanings[kPanelsAtOnce];
    for (int64_t i = 0; first + i < last; ++i)
      meanings[i] = meant[static_cast<size_t>(i)].of((first + i) * kPanel, rows_of(first + i));
    std::fill(totals.begin(), totals.end(), 0.0f);
    for (int64_t c = 0; c < K; c += kAtOnce) {
      const int64_t stop = std::min(c + kAtOnce, K), wide = std::min(kAtOnce, pitch - c);
      for (int64_t panel = first; panel < last; ++panel) {
        const RowsOfCodes rows{meanings[panel - first], codes + panel * kPanel * row_bytes, row_bytes, K,
                               static_cast<int>(rows_of(panel)), nullptr, {}};
        spell<E>(kernels, rows, c, stop, tile.get(), kAtOnce);
        E::dots(kernels)(tile.get(), kAtOnce, x + c, pitch, tokens.count, wide, totals.data() + (panel - first) * sums);
      }
    }
    for (int64_t panel = first; panel < last; ++panel)
      kernels.products->finish(out, tokens, panel, totals.data() + (panel - first) * sums);
  }
}

template <class E>
void multiply_many_rows(const Kernels& kernels, Values values, const ByteScales& scales, const uint8_t* codes,
                        int64_t row_bytes, const Inputs& in, const Outputs& out, int threads) {
  using Element = typename E::Element;
  const int64_t panels = (out.N + kPanel - 1) / kPanel, most = std::min(kTokens, in.M);
  const int64_t pitch = (in.K + E::kColumns - 1) / E::kColumns * E::kColumns;
  const auto x = aligned<Element>(most * pitch);
  std::fill_n(x.get(), most * pitch, Element{0});
  values.meaning.out = E::kType;
  for (int64_t first = 0; first < in.M; first += kTokens) {
    const Tokens tokens{nullptr, std::min(kTokens, in.M - first), first};
    for (int64_t m = 0; m < tokens.count; ++m) E::inputs(kernels, in, first + m, x.get() + m * pitch);
    const int64_t least = kWork / std::max<int64_t>(1, in.K * kPanel * tokens.count) + 1;
    parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
      multiply_spelled<E>(kernels, values, scales, codes, row_bytes, x.get(), pitch, tokens, out, in.K, begin, end);
    });
  }
}

}  // namespace
}  // namespace qload::cpu
