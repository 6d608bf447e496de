// The division of a layer among blocks; warps take chunks of K in turns.
#pragma once

#include <algorithm>

#include "../device/division.h"

namespace qload::cuda {

constexpr int kChunk = 128, kSteps = 4;  // rows of a chunk; steps of 32 rows in it

enum class Order : int { kMarlin, kOwn };
// kChunks: 128 rows or all; kSymmetric: the same without zero points; kSmall: 32 or 64 rows; kLookedUp: an index per row;
// kTiles: numbers with scales of tiles of 128 rows, or of columns; kScaled: 16 to 128 rows, with scaled operands;
// kOffsets: integers with offsets.
enum class Groups : int { kChunks, kSymmetric, kSmall, kLookedUp, kTiles, kScaled, kOffsets };

/// Whether groups may end within a chunk, by `Chunks::ends`.
__host__ __device__ constexpr bool are_small(Groups groups) { return groups == Groups::kSmall || groups == Groups::kOffsets; }

struct Chunks : Division {     // the same for all blocks
  int chunks;                  // of K
  int ends;                    // bit i: a group ends with step i of a chunk
  int group_step, chunk_step;  // distance to the next group within a chunk, and to the warp's next chunk; 0: one scale per column
  int turn_groups;             // groups in one turn of all warps

  void lay_groups(int K, int group) {
    chunks = (K + kChunk - 1) / kChunk, per_chunk_ = group >= K ? 0 : std::max(1, kChunk / group);
    ends = per_chunk_ <= 1 ? 8 : per_chunk_ == 2 ? 10 : 15;
  }
  /// Compute the steps, after `row_warps` is set.
  void lay_steps() {
    group_step = 1, turn_groups = per_chunk_ * row_warps;
    chunk_step = per_chunk_ == 0 ? 0 : turn_groups - per_chunk_ + 1;
  }
  bool has_small_groups() const { return per_chunk_ > 1; }

 private:
  int per_chunk_;  // groups that begin in a chunk; 0: one scale per column
};

/// Maximal warps of a block, by their registers.
__host__ __device__ constexpr int most_warps(int token_tiles, Groups groups) {
  if (groups == Groups::kSymmetric) return token_tiles <= 2 ? 16 : token_tiles == 3 ? 12 : 8;
  return most_warps(token_tiles);
}

/// The part of a warp: chunks [first, last) of a tile, `turn` apart; `busy`: whether it has any.
struct Part {
  int tile, first, last, turn;
  bool busy;
};

/// Whether x for strips goes through shared memory: so many tokens exceed the registers.
__host__ __device__ constexpr bool are_staged(int tokens, Groups groups) {
  return groups == Groups::kSymmetric && tokens > 24;
}
constexpr int kTokenBytes = 2 * kChunk;  // of a token's chunk of x for strips in shared memory

/// Bytes of shared memory of a warp: two chunks of x, or its sums.
__host__ __device__ constexpr int warp_bytes(int tokens, Order order, Groups groups) {
  const int of_token = are_staged(tokens, groups) ? kTokenBytes : order == Order::kMarlin ? (kChunk + 8) * 2 : 0;
  const int sums = tokens * kSumPitch * 4, inputs = 2 * tokens * of_token;
  return inputs > sums ? inputs : sums;
}

}  // namespace qload::cuda
