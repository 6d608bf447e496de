// How a launch divides a layer among blocks whose warps take chunks of K in turns.
#pragma once

#include <algorithm>

#include "../device/division.h"

namespace qload::cuda {

constexpr int kChunk = 128, kSteps = 4;  // rows; of 32 rows in a chunk

enum class Order : int { kMarlin, kOwn };
// Of 128 rows or all, the same without zero points; of 32 or 64; of any rows; of numbers: of tiles of 128 rows, or columns;
// of 16 to 128 rows, by which operands are multiplied; of integers with offsets.
enum class Groups : int { kChunks, kSymmetric, kSmall, kLookedUp, kTiles, kScaled, kOffsets };

/// Whether groups may end within a chunk, by `Chunks::ends`.
__host__ __device__ constexpr bool are_small(Groups groups) { return groups == Groups::kSmall || groups == Groups::kOffsets; }

struct Chunks : Division {     // and what else is the same for all blocks
  int chunks;                  // of K
  int ends;                    // bit i: a group ends with step i of a chunk
  int group_step, chunk_step;  // to the next group of a chunk, to that of a warp's next; 0: one scale a column
  int turn_groups;             // groups of all warps' chunks of a turn

  void lay_groups(int K, int group) {
    chunks = (K + kChunk - 1) / kChunk, per_chunk_ = group >= K ? 0 : std::max(1, kChunk / group);
    ends = per_chunk_ <= 1 ? 8 : per_chunk_ == 2 ? 10 : 15;
  }
  /// Once it is known how many warps take chunks in turns.
  void lay_steps() {
    group_step = 1, turn_groups = per_chunk_ * row_warps;
    chunk_step = per_chunk_ == 0 ? 0 : turn_groups - per_chunk_ + 1;
  }
  bool has_small_groups() const { return per_chunk_ > 1; }

 private:
  int per_chunk_;  // groups that begin in a chunk; 0: one scale a column
};

/// Warps of a block, whose registers are enough for what they keep.
__host__ __device__ constexpr int most_warps(int token_tiles, Groups groups) {
  if (groups == Groups::kSymmetric) return token_tiles <= 2 ? 16 : token_tiles == 3 ? 12 : 8;
  return most_warps(token_tiles);
}

/// What a warp multiplies: chunks [first, last) of a tile, `turn` apart; whether there are any.
struct Part {
  int tile, first, last, turn;
  bool busy;
};

/// Whether x of our own order goes through shared memory: registers are too few for so many tokens.
__host__ __device__ constexpr bool are_staged(int tokens, Groups groups) {
  return groups == Groups::kSymmetric && tokens > 24;
}
constexpr int kTokenBytes = 2 * kChunk;  // of a token's chunk of x in our own order in shared memory

/// Bytes of shared memory of a warp: x twice, or its sums.
__host__ __device__ constexpr int warp_bytes(int tokens, Order order, Groups groups) {
  const int of_token = are_staged(tokens, groups) ? kTokenBytes : order == Order::kMarlin ? (kChunk + 8) * 2 : 0;
  const int sums = tokens * kSumPitch * 4, inputs = 2 * tokens * of_token;
  return inputs > sums ? inputs : sums;
}

}  // namespace qload::cuda
