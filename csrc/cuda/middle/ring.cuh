// A block's ring: stages of 64 rows, each with x, weights, scales and zero points, filled by copies of boxes.
#pragma once

#include "../device/ring.cuh"

namespace qload::cuda::middle_room {

constexpr int kStage = 64, kSteps = kStage / 16, kMostStages = 16;
constexpr int kTile = 64, kQuad = 4;         // columns of a tile, tiles of a box
constexpr int kMultiply = 256, kFill = 128;  // threads of a block: those that multiply, and those that fill the ring

/// What copies read: boxes of a stage and a quad of tiles, or as many tokens as a block has.
struct Matrices {
  CUtensorMap inputs, weights, scales, zeros;
};

struct Work {  // how a launch divides a layer
  int all, split;                           // stages of K, blocks that share them
  int stages;                               // of the ring,
  int stage_bytes, scales_at, zeros_at;     // each with x first; weights lie behind
  int group, group_rows;                    // rows of a group, and groups that begin in a stage or are all of it
  bool has_zeros;
};

/// The stages of a block: it computes them where it needs them, rather than keep them from here to there.
__device__ __forceinline__ int first_of(const Work& work) { return work.all * blockIdx.x / work.split; }
__device__ __forceinline__ int last_of(const Work& work) { return work.all * (blockIdx.x + 1) / work.split; }

template <int bits>
constexpr int kBoxBytes = kSteps * kQuad * 128 * bits;  // of weights

/// Fills stages with the block's `quads` and tokens.
template <int bits, int tokens, int quads>
struct Filling {
  const Matrices& from;
  const Work& work;
  unsigned char* memory;
  uint64_t *full, *empty;  // barriers of a slot: all of it, nothing of it

  /// Of one thread: asks for the weights, scales and zero points of all stages.
  __device__ __forceinline__ void weights() const {
    const uint64_t policy = gridDim.y == 1 ? leaves_first() : stays();
    const int first = first_of(work);
    each([&](int stage, int slot) { weights(stage, slot, stage == first, policy); });
  }

  /// Of another, so that x comes as soon as it may, and not behind all weights that there is room for.
  __device__ __forceinline__ void inputs() const {
    wait_for_earlier_kernels();
    each([&](int stage, int slot) {
      expect_bytes(full + slot, tokens * kStage * 2);
      copy_box(memory + slot * work.stage_bytes, from.inputs, stage * kStage, blockIdx.y * tokens, full + slot, stays());
    });
  }

 private:
  /// Stages and their slots, in turns, once these are empty.
  template <class Ask>
  __device__ __forceinline__ void each(const Ask& ask) const {
    const int first = first_of(work), last = last_of(work);
    int slot = 0, parity = 1;
#pragma unroll 1
    for (int stage = first; stage < last; ++stage) {
      if (stage - first >= work.stages) wait_for(empty + slot, parity);
      ask(stage, slot);
      if (++slot == work.stages) slot = 0, parity ^= 1;
    }
  }

  __device__ __forceinline__ void weights(int stage, int slot, bool begins, uint64_t policy) const {
    unsigned char* to = memory + slot * work.stage_bytes;
    const int scale_bytes = work.group_rows * kQuad * kTile * 2, zero_bytes = work.group_rows * kQuad * 8 * bits;
    const bool scales = begins || work.group <= kStage || stage * kStage % work.group == 0;  // no division for each stage
    expect_bytes(full + slot, quads * (kBoxBytes<bits> + (scales ? scale_bytes : 0) +
                                       (scales && work.has_zeros ? zero_bytes : 0)));
#pragma unroll
    for (int quad = 0; quad < quads; ++quad) {
      const int box = blockIdx.z * quads + quad;
#pragma unroll
      for (int half = 0; half < bits / 4; ++half)  // a box has at most 256 elements of eight bytes a row
        copy_box(to + tokens * kStage * 2 + quad * kBoxBytes<bits> + half * kBoxBytes<4>, from.weights,
                 (box * bits / 4 + half) * 256, stage * kSteps, full + slot, policy);
      if (!scales) continue;
      const int group = work.group <= kStage ? stage * work.group_rows : stage * kStage / work.group;
      copy_box(to + work.scales_at + quad * scale_bytes, from.scales, box * kQuad * kTile, group, full + slot, policy);
      if (work.has_zeros)
        copy_box(to + work.zeros_at + quad * zero_bytes, from.zeros, box * kQuad * 2 * bits, group, full + slot,
                 policy);
    }
  }
};

}  // namespace qload::cuda::middle_room
