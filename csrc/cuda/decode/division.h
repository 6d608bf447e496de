// How a launch divides a layer among blocks whose warps take chunks of K in turns.
#pragma once

#include "../device/division.h"

namespace qload::cuda {

constexpr int kChunk = 128, kSteps = 4;  // rows; of 32 rows in a chunk

enum class Order : int { kMarlin, kOwn };
enum class Groups : int { kChunks, kSmall, kLookedUp };  // of 128 rows or all; of 32 or 64; of any rows

struct Chunks : Division {     // and what else is the same for all blocks
  int chunks;                  // of K
  int ends;                    // bit i: a group ends with step i of a chunk
  int group_step, chunk_step;  // to the next group of a chunk, to that of a warp's next; 0: one scale a column
};

/// Bytes of shared memory of a warp: x twice, or its sums.
__host__ __device__ constexpr int warp_bytes(int tokens, Order order) {
  const int sums = tokens * kSumPitch * 4, inputs = 2 * tokens * (kChunk + 8) * 2;
  return order == Order::kMarlin && inputs > sums ? inputs : sums;
}

}  // namespace qload::cuda
