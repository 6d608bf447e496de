// How a launch divides a layer, the same for all blocks.
#pragma once

namespace qload::cuda::exl {

constexpr int kTileN = 64;             // columns of a warp
constexpr int kTokens = 16;            // of a block at the most
constexpr int kSumPitch = kTileN + 4;  // elements between tokens: lanes of a warp meet in no bank

constexpr int warps_of(int token_tiles) { return token_tiles == 1 ? 16 : 12; }

struct Division {
  int columns, split;  // tiles of a block, blocks of a cluster that share them
  int row_warps;       // of a block, for each tile
  int column_factor;   // a warp's number times this, shifted by 16, is divided by columns
  int share, rest;     // chunks of a warp; how many of the first warps have one more
  int room_at;         // bytes: where in shared memory sums of other blocks lie
  bool runs;           // rows of x are in order and lie so that 16 bytes of them can be read at once
};

}  // namespace qload::cuda::exl
