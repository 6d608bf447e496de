// What all blocks of tiles.cuh share, made once for a launch.
#pragma once

#include <cstdint>

#include "../move/plan.h"

namespace qload::cuda {

constexpr int kMostTileRegisterBits = 4;  // of words that a thread loads
constexpr int kMostTileRegisters = 1 << kMostTileRegisterBits;
constexpr int kMostParts = 4;

struct Tiles {         // places in bytes
  int64_t pitch;       // of rows of `out`, in elements
  int row_words_bits;  // rows of the plan's target are so many words apart, as a power of two
  int same;            // 2**same neighbouring places share scale and zero point
  bool paired;         // codes of a pair lie four apart in a word (packed.cpp)
  bool grouped;        // the group of every code is looked up in a table, and nothing else is unusual
  bool whole;          // `out` and its rows start at multiples of 16 bytes
  int8_t bit[kMostTileBits];  // the bits of a place, those that count rows first
  uint32_t put[kMostTileRegisters];   // where a thread's words go in shared memory
  uint32_t take[kMostTileRegisters];  // and where those are that it takes, word after word,
  uint32_t to[kMostTileRegisters];    // what they add to its place in `out`,
  uint32_t to_thread[kThreadBits];    // and what each bit of its number does;
  uint32_t take_part[kMostParts], to_part[kMostParts];  // where threads take parts of words: turn after turn
};

}  // namespace qload::cuda
