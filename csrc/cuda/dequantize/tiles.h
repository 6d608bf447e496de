// Parameters common to all blocks of tiles.cuh, computed once for a launch.
#pragma once

#include <cstdint>

#include "../move/plan.h"

namespace qload::cuda {

constexpr int kMostTileRegisterBits = 4;  // of a thread's words
constexpr int kMostTileRegisters = 1 << kMostTileRegisterBits;
constexpr int kMostParts = 4;

struct Tiles {         // offsets in bytes
  int64_t pitch;       // of rows of `out`, in elements
  int row_words_bits;  // words between rows of the plan's target, as a power of two
  int same;            // 2**same neighbouring words share scale and zero point
  bool paired;         // codes of a pair are four positions apart in a word (packed.cpp)
  bool grouped;        // groups come from a table, and everything else is regular
  bool whole;          // `out` and its rows start at multiples of 16 bytes
  int8_t bit[kMostTileBits];  // the bits of an offset, those that count rows first
  uint32_t put[kMostTileRegisters];   // shared memory offsets for a thread's stores
  uint32_t take[kMostTileRegisters];  // shared memory offsets for its loads, word by word
  uint32_t to[kMostTileRegisters];    // their distances in `out`
  uint32_t to_thread[kThreadBits];    // distances in `out` for each bit of the thread number
  uint32_t take_part[kMostParts], to_part[kMostParts];  // offsets for parts of words, turn by turn
};

}  // namespace qload::cuda
