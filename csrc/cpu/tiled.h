// Products of many tokens by tiles of bfloat16: 16 rows of 16 words, of which one instruction multiplies two.
//
//   sums[i, j] += sum over p of first[i, p] * second[p, j]     16 x 16 float32; words are pairs of bfloat16
//
// The word of a pair has both of its inputs, or both of its weights, the first in the low half. So 32 columns of 16
// rows of bfloat16 are a first operand as they lie, and a pair of rows of a panel (pairs.h) is a row of a second one:
//
//   panels   first: tokens, in the order of the pairs; second: the panel, spelled out
//   rows     first: rows, spelled out; second: tokens, turned
//
// Inputs are arranged once for all outputs. Of some panels, or 16 rows each, `kTileDepth` inputs are spelled out at
// once into memory that stays in the cache, where two of them meet two blocks of 16 tokens: four loads for four products.
//
// Products are exact and sums are float32, within an instruction those of the first of all pairs apart from those of the
// second; what lies below 2**-126 counts as 0, as in pairs.h.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace qload::cpu {

constexpr int64_t kTileRows = 16, kTileWords = kTileRows * kTileRows;
constexpr int64_t kTileInputs = 2 * kTileRows;  // of a token
constexpr int64_t kTileDepth = 512;             // inputs, a multiple of those of a tile
constexpr int64_t kTilePanels = 8;              // that share inputs
constexpr int64_t kTilePitch = kTileDepth + 32;  // of rows that are spelled out: of a power of two all would share few
                                                 // lines of a cache

constexpr int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct TiledRows {  // some panels of 16 rows
  const uint16_t* spelled;  // `kTilePitch` apart
  int64_t rows, panels;
  const uint32_t* x;  // from the first input on that is spelled out
  int64_t blocks, apart;  // of 16 tokens; words between them
  int64_t first, steps;   // inputs; `kTileInputs` each
  /// Of each panel what its rows mean, where values are spelled out without their scales; or null.
  const Meaning* const* scaled;
};

struct TileProducts {
  /// Around a thread's work with tiles.
  void (*start)();
  void (*stop)();
  /// A token's floats, in the order of a panel's rows, as `parts` of bfloat16: its words of each tile, one of a part
  /// after another.
  void (*inputs_of_panels)(const float* row, int64_t rows, int parts, uint32_t* to);
  /// Up to 16 tokens of bfloat16: tiles one after another, zeros where there is none.
  void (*inputs_of_rows)(const uint16_t* x, int64_t pitch, int64_t tokens, int64_t columns, uint32_t* to);
  /// Panels [begin, end), whose groups are whole tiles. `spelled`: `kTilePanels * kTileDepth / 2 * kPanel` words;
  /// `totals`: as many panels times 16 floats for each token of whole blocks.
  void (*panels)(const Panels&, const PairedTokens&, const Outputs&, int64_t begin, int64_t end, uint32_t* spelled,
                 float* totals);
  /// Whether values without scales are spelled out: they are bfloat16, and runs are whole tiles.
  bool (*has_values)(const Meaning&, int64_t columns);
  /// These values of `count` codes of each row, zeros up to a whole tile.
  void (*spell_values)(const Meaning&, const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t count,
                       uint16_t* to);
  /// Whether codes of 4 bits with their scales are spelled out here.
  bool (*has_nibbles)(const Meaning&, int64_t columns);
  /// Codes [first, first + count) of up to 16 rows, where `codes` starts, rounded to bfloat16 once, but that what is below
  /// 2**-126 becomes 0; zeros up to a whole tile.
  void (*spell_nibbles)(const Meaning* rows, const uint8_t* codes, int64_t row_bytes, int64_t count_of_rows,
                        int64_t first, int64_t count, uint16_t* to);
  /// totals (panels, blocks, 16 outputs, 16 tokens) += the products.
  void (*rows)(const TiledRows&, float* totals);
  /// Squares of 16 x 16 with rows and columns exchanged.
  void (*turn)(float* squares, int64_t count);
};

}  // namespace qload::cpu
