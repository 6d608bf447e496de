// How a launch divides a layer, the same for all blocks.
#pragma once

#include <cuda_runtime_api.h>

namespace qload::cuda {

constexpr int kTileN = 64, kChunk = 128, kSteps = 4;  // columns; rows; of 32 rows in a chunk
constexpr int kSumPitch = kTileN + 4;  // elements between tokens: lanes of a warp meet in no bank

enum class Order : int { kMarlin, kOwn };
enum class Groups : int { kChunks, kSmall, kLookedUp };  // of 128 rows or all; of 32 or 64; of any rows

/// Up to 16 tokens need more registers than 16 warps have.
__host__ __device__ constexpr int most_warps(int token_tiles) { return token_tiles == 2 ? 12 : 16; }

struct Division {
  int columns, split;           // tiles of a block, blocks of a cluster that share them
  int chunks;                   // of K
  int ends;                     // bit i: a group ends with step i of a chunk
  int group_step, chunk_step;   // to the next group of a chunk, to that of a warp's next; 0: one scale a column
  bool runs;                    // x can be read 16 bytes at a time
  int room_at;                  // bytes: where in shared memory other blocks put their sums
};

/// Bytes of shared memory of a warp: x twice, or its sums.
__host__ __device__ constexpr int warp_bytes(int tokens, Order order) {
  const int sums = tokens * kSumPitch * 4, inputs = 2 * tokens * (kChunk + 8) * 2;
  return order == Order::kMarlin && inputs > sums ? inputs : sums;
}

}  // namespace qload::cuda
