// Products of many tokens by tiles of bfloat16, 16 rows of 16 words. One instruction multiplies two tiles.
//
//   sums[i, j] += sum over p of first[i, p] * second[p, j]     16 x 16 float32; words are pairs of bfloat16
//
// The word of a pair has both of its inputs, or both of its weights, the first in the low half. So 32 columns of 16
// rows of bfloat16 are a first operand without a change of order, and a pair of rows of a panel (pairs.h) is a row of a
// second one:
//
//   panels   first: tokens, in the order of the pairs; second: the panel, decoded
//   rows     first: rows, decoded; second: tokens, transposed
//
// Inputs are arranged once for all outputs. For some panels, or groups of 16 rows, `kTileDepth` inputs at once are decoded
// into memory that stays in the cache. Two panels are multiplied there with two blocks of 16 tokens: four loads for four
// products.
//
// Products are exact and sums are float32. An instruction sums the first products of all pairs separately from the
// second ones; magnitudes below 2**-126 count as 0, as in pairs.h.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace qload::cpu {

constexpr int64_t kTileRows = 16, kTileWords = kTileRows * kTileRows;
constexpr int64_t kTileInputs = 2 * kTileRows;  // of a token in one tile
constexpr int64_t kTileDepth = 512;             // inputs decoded at once, a multiple of `kTileInputs`
constexpr int64_t kTilePanels = 8;              // panels with common inputs
constexpr int64_t kTilePitch = kTileDepth + 32;  // of decoded rows: with a power of two, all would share few lines of a cache

constexpr int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct TiledRows {  // some panels of 16 rows
  const uint16_t* spelled;  // `kTilePitch` apart
  int64_t rows, panels;
  const uint32_t* x;  // from the first decoded input on
  int64_t blocks, apart;  // blocks of 16 tokens; words between them
  int64_t first, steps;   // first input; steps of `kTileInputs`
  /// For each panel the meaning of its rows, if values are decoded without their scales; or null.
  const Meaning* const* scaled;
};

struct TileProducts {
  /// Configures and releases the tiles of a thread.
  void (*start)();
  void (*stop)();
  /// Converts a token's floats, in the order of a panel's rows, to `parts` of bfloat16: its words of each tile, one part
  /// after another.
  void (*inputs_of_panels)(const float* row, int64_t rows, int parts, uint32_t* to);
  /// Copies up to 16 tokens of bfloat16 into consecutive tiles; missing tokens and columns are zeros.
  void (*inputs_of_rows)(const uint16_t* x, int64_t pitch, int64_t tokens, int64_t columns, uint32_t* to);
  /// Multiplies panels [begin, end) with whole tiles in each group. `spelled`: `kTilePanels * kTileDepth / 2 * kPanel`
  /// words; `totals`: for each of `kTilePanels` panels 16 floats a token, for whole blocks of tokens.
  void (*panels)(const Panels&, const PairedTokens&, const Outputs&, int64_t begin, int64_t end, uint32_t* spelled,
                 float* totals);
  /// Whether values are decoded without scales: they are bfloat16, and runs are whole tiles.
  bool (*has_values)(const Meaning&, int64_t columns);
  /// Decodes `count` codes of each row to values without scales, zero-padded to a whole tile.
  void (*spell_values)(const Meaning&, const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t count,
                       uint16_t* to);
  /// Whether `spell_nibbles` supports this meaning: codes of 4 bits, decoded with their scales.
  bool (*has_nibbles)(const Meaning&, int64_t columns);
  /// Decodes codes [first, first + count) of up to 16 rows, rounded to bfloat16 once; magnitudes below 2**-126 become 0.
  /// `codes` is the address of code `first`; the output is zero-padded to a whole tile.
  void (*spell_nibbles)(const Meaning* rows, const uint8_t* codes, int64_t row_bytes, int64_t count_of_rows,
                        int64_t first, int64_t count, uint16_t* to);
  /// totals (panels, blocks, 16 outputs, 16 tokens) += the products.
  void (*rows)(const TiledRows&, float* totals);
  /// Transposes squares of 16 x 16.
  void (*turn)(float* squares, int64_t count);
};

}  // namespace qload::cpu
