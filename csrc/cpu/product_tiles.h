// Many tokens by tiles: inputs arranged as operands, panels and rows divided among threads. tiled.h has the formula.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "aligned.h"
#include "gathered.h"
#include "parallel.h"
#include "rows_many.h"
#include "tiled.h"

namespace qload::cpu {
namespace {

constexpr int64_t kLeastOfPanels = 4, kLeastOfValues = 6, kLeastOfRows = 17;  // tokens, at least
constexpr int64_t kInputsOfThread = 1 << 16;  // inputs for each thread, at least

/// Scope guard of a thread's use of tiles.
class InTiles {
 public:
  explicit InTiles(const Kernels& kernels) : tiles_(*kernels.tiles) { tiles_.start(); }
  ~InTiles() { tiles_.stop(); }
  InTiles(const InTiles&) = delete;
  InTiles& operator=(const InTiles&) = delete;
  const TileProducts* operator->() const { return &tiles_; }

 private:
  const TileProducts& tiles_;
};

bool are_in_tiles(const Kernels& kernels, const Panels& weight, const Inputs& in) {
  return kernels.tiles && in.M >= kLeastOfPanels && in.type != Float::kFloat32 && weight.run % kTileInputs == 0;
}

bool are_in_tiles(const Kernels& kernels, const Values& values, const Inputs& in) {
  const auto least = [&] { return kernels.tiles->has_values(values.meaning, in.K) ? kLeastOfValues : kLeastOfRows; };
  return kernels.tiles && in.type == Float::kBfloat16 && in.M >= kLeastOfValues && in.M >= least();
}

/// Calls `work(block)` for each block of 16 tokens; a block has `words` words of inputs.
template <class Work>
void arrange(int64_t tokens, int64_t words, int threads, const Work& work) {
  parallel_for(tiles_of(tokens, kTileRows), kInputsOfThread / std::max<int64_t>(1, words) + 1, threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t block = begin; block < end; ++block) work(block);
               });
}

void multiply_in_tiles(const Kernels& kernels, const Panels& weight, const Inputs& in, const Outputs& out,
                       int64_t panels, int threads) {
  const Gathered gathered(kernels, weight, in);
  const int parts = in.type == Float::kBfloat16 ? 1 : 2;
  const int64_t words = weight.rows / 2 * parts * kTileRows, blocks = tiles_of(std::min(kTokens, in.M), kTileRows);
  const auto x = aligned<uint32_t>(blocks * words);
  for (int64_t first = 0; first < in.M; first += kTokens) {
    const PairedTokens tokens{x.get(), parts, std::min(kTokens, in.M - first), first};
    arrange(tokens.count, words, threads, [&](int64_t block) {
      auto row = gathered.room();
      const auto token = aligned<float>(weight.rows);
      for (int64_t t = 0; t < kTileRows; ++t) {
        const int64_t m = block * kTileRows + t;
        if (m < tokens.count)
          gathered.one(first + m, weight.rows, token.get(), 1, row.data());
        else
          std::fill_n(token.get(), weight.rows, 0.0f);
        kernels.tiles->inputs_of_panels(token.get(), weight.rows, parts, x.get() + block * words + t * kTileRows);
      }
    });
    const int64_t least = kWork / std::max<int64_t>(1, weight.rows * kPanel * tokens.count) + 1;
    parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
      const auto spelled = aligned<uint32_t>(kTilePanels * kTileDepth / 2 * kPanel);
      const auto totals = aligned<float>(kTilePanels * blocks * kTileWords);
      InTiles(kernels)->panels(weight, tokens, out, begin, end, spelled.get(), totals.get());
    });
  }
}

/// Multiplies some tokens, `x`, with panels [begin, end) of rows.
void multiply_spelled_rows(const Kernels& kernels, const Values& values, const ByteScales& scales,
                           const uint8_t* codes, int64_t row_bytes, const uint32_t* x, const Tokens& tokens,
                           const Outputs& out, int64_t K, int64_t begin, int64_t end) {
  const int64_t blocks = tiles_of(tokens.count, kTileRows), sums = blocks * kTileWords;
  const auto spelled = aligned<uint16_t>(kTilePanels * kPanel * kTilePitch);
  const auto totals = aligned<float>(kTilePanels * sums);
  std::fill_n(spelled.get(), kTilePanels * kPanel * kTilePitch, uint16_t{0});
  std::vector<RowsMeant> meant;
  for (int64_t i = 0; i < kTilePanels; ++i) meant.emplace_back(kernels, values, scales, true);
  const InTiles tiles(kernels);
  const bool as_values = tiles->has_values(values.meaning, K), as_nibbles = tiles->has_nibbles(values.meaning, K);
  for (int64_t first = begin; first < end; first += kTilePanels) {
    const int64_t panels = std::min(kTilePanels, end - first), rows = std::min(panels * kPanel, out.N - first * kPanel);
    TiledRows some{spelled.get(), rows, panels, x, blocks, tiles_of(K, kTileInputs) * kTileWords, 0, 0, nullptr};
    const Meaning* meanings[kTilePanels];
    for (int64_t i = 0; i < panels; ++i)
      meanings[i] = meant[static_cast<size_t>(i)].of((first + i) * kPanel, std::min<int64_t>(kPanel, rows - i * kPanel));
    std::fill_n(totals.get(), panels * sums, 0.0f);
    if (as_values) some.scaled = meanings;
    for (int64_t c = 0; c < K; c += kTileDepth, some.x += some.steps * kTileWords) {
      const int64_t stop = std::min(c + kTileDepth, K);
      const uint8_t* const from = codes + first * kPanel * row_bytes;
      if (as_values) tiles->spell_values(values.meaning, from + c, row_bytes, rows, stop - c, spelled.get());
      for (int64_t r = 0; !as_values && r < rows; r += kPanel) {
        const Meaning* const meaning = meanings[r / kPanel];
        const uint8_t* const row = from + r * row_bytes;
        const int64_t count = std::min<int64_t>(kPanel, rows - r);
        uint16_t* const to = spelled.get() + r * kTilePitch;
        if (as_nibbles)
          tiles->spell_nibbles(meaning, row + c / 2, row_bytes, count, c, stop - c, to);
        else
          spell<InHalves>(kernels, {meaning, row, row_bytes, K, static_cast<int>(count), nullptr, {}}, c, stop, to,
                          kTilePitch);
      }
      some.first = c;
      some.steps = tiles_of(stop - c, kTileInputs);
      tiles->rows(some, totals.get());
    }
    tiles->turn(totals.get(), panels * blocks);
    for (int64_t i = 0; i < panels; ++i)
      kernels.products->finish(out, tokens, first + i, totals.get() + i * sums);
  }
}

void multiply_rows_in_tiles(const Kernels& kernels, Values values, const ByteScales& scales, const uint8_t* codes,
                            int64_t row_bytes, const Inputs& in, const Outputs& out, int threads) {
  const int64_t panels = (out.N + kPanel - 1) / kPanel, words = tiles_of(in.K, kTileInputs) * kTileWords;
  const auto x = aligned<uint32_t>(tiles_of(std::min(kTokens, in.M), kTileRows) * words);
  values.meaning.out = Float::kBfloat16;
  for (int64_t first = 0; first < in.M; first += kTokens) {
    const Tokens tokens{nullptr, std::min(kTokens, in.M - first), first};
    arrange(tokens.count, words, threads, [&](int64_t block) {
      const int64_t m = block * kTileRows;
      kernels.tiles->inputs_of_rows(static_cast<const uint16_t*>(in.x) + (first + m) * in.pitch, in.pitch,
                                    tokens.count - m, in.K, x.get() + block * words);
    });
    const int64_t least = kWork / std::max<int64_t>(1, in.K * kPanel * tokens.count) + 1;
    parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
      multiply_spelled_rows(kernels, values, scales, codes, row_bytes, x.get(), tokens, out, in.K, begin, end);
    });
  }
}

}  // namespace
}  // namespace qload::cpu
