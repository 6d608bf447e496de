// How a launch divides a layer among blocks and their warps: what kernels share whose warps have tiles of columns.
#pragma once

#include <cuda_runtime_api.h>

namespace qload::cuda {

constexpr int kTileN = 64;             // columns of a tile
constexpr int kSumPitch = kTileN + 4;  // elements between tokens: lanes of a warp meet in no bank

/// Up to 16 tokens need more registers than 16 warps have.
__host__ __device__ constexpr int most_warps(int token_tiles) { return token_tiles == 3 ? 8 : token_tiles == 2 ? 12 : 16; }

struct Division {      // the same for all blocks
  int columns, split;  // tiles of a block, blocks of a cluster that share them
  int row_warps;       // of a block, for each tile
  int room_at;         // bytes: where in shared memory other blocks put their sums
  bool runs;           // x can be read 16 bytes at a time
};

}  // namespace qload::cuda
