// The division of a layer among blocks and their warps, common to all kernels with warps of whole column tiles.
#pragma once

#include <cuda_runtime_api.h>

namespace qload::cuda {

constexpr int kTileN = 64;             // columns of a tile
constexpr int kSumPitch = kTileN + 4;  // elements between tokens, free of bank conflicts

/// Accumulators of 9 tokens and more exceed the registers of 16 warps.
__host__ __device__ constexpr int most_warps(int token_tiles) { return token_tiles == 3 ? 8 : token_tiles == 2 ? 12 : 16; }

struct Division {      // the same for all blocks
  int columns, split;  // tiles of a block, blocks of a cluster that share them
  int row_warps;       // of a block, for each tile
  int room_at;         // byte offset in shared memory of the sums from other blocks
  bool runs;           // x can be read 16 bytes at a time
};

}  // namespace qload::cuda
