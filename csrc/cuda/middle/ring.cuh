// A block's ring: stages of 64 rows, each with x, weights, scales and zero points, filled by copies of boxes.
#pragma once

#include "../device/ring.cuh"

namespace qload::cuda::middle_room {

constexpr int kStage = 64, kSteps = kStage / 16, kMostStages = 16;
constexpr int kTile = 64, kQuad = 4;  // columns of a tile, tiles of a box

/// What copies read: boxes of a stage and a quad of tiles, or as many tokens as a block has.
struct Matrices {
  CUtensorMap inputs, weights, scales, zeros;
};

struct Work {  // how a launch divides a layer
  int split;
  int stages;                               // of the ring,
  int stage_bytes, scales_at, zeros_at;     // each with x first; weights lie behind
  int group, group_rows;                    // rows of a group, and groups that begin in a stage or are all of it
  bool has_zeros;
};

template <int bits>
constexpr int kBoxBytes = kSteps * kQuad * 128 * bits;  // of weights

/// Of one thread: fills stages with the block's `quads` and tokens.
template <int bits, int tokens, int quads>
struct Filling {
  const Matrices& from;
  const Work& work;
  unsigned char* memory;
  uint64_t* full;
  int first, first_token;  // stage and token
  uint64_t policy;         // of weights

  __device__ __forceinline__ bool brings_scales(int stage) const {
    return stage == first || stage * kStage % work.group == 0;
  }

  /// All but x.
  __device__ __forceinline__ void weights(int stage, int slot) const {
    unsigned char* to = memory + slot * work.stage_bytes;
    const int scale_bytes = work.group_rows * kQuad * kTile * 2, zero_bytes = work.group_rows * kQuad * 8 * bits;
    const bool scales = brings_scales(stage);
    expect_bytes(full + slot, tokens * kStage * 2 + quads * (kBoxBytes<bits> + (scales ? scale_bytes : 0) +
                                                             (scales && work.has_zeros ? zero_bytes : 0)));
#pragma unroll
    for (int quad = 0; quad < quads; ++quad) {
      const int box = blockIdx.z * quads + quad;
#pragma unroll
      for (int half = 0; half < bits / 4; ++half)  // a box has at most 256 elements of eight bytes a row
        copy_box(to + tokens * kStage * 2 + quad * kBoxBytes<bits> + half * kBoxBytes<4>, from.weights,
                 (box * bits / 4 + half) * 256, stage * kSteps, full + slot, policy);
      if (!scales) continue;
      const int group = stage * kStage / work.group;
      copy_box(to + work.scales_at + quad * scale_bytes, from.scales, box * kQuad * kTile, group, full + slot, policy);
      if (work.has_zeros)
        copy_box(to + work.zeros_at + quad * zero_bytes, from.zeros, box * kQuad * 2 * bits, group, full + slot,
                 policy);
    }
  }

  /// All stages; only x waits for the kernel ahead.
  __device__ __forceinline__ void all(int last, uint64_t* empty) const {
    const int ahead = min(last - first, work.stages);
    for (int i = 0; i < ahead; ++i) weights(first + i, i);
    wait_for_earlier_kernels();
    for (int i = 0; i < ahead; ++i) inputs(first + i, i);
    int slot = 0, parity = 0;
    for (int stage = first + ahead; stage < last; ++stage) {
      wait_for_bytes(empty + slot, parity);
      weights(stage, slot);
      inputs(stage, slot);
      if (++slot == work.stages) slot = 0, parity ^= 1;
    }
  }

  __device__ __forceinline__ void inputs(int stage, int slot) const {
    copy_box(memory + slot * work.stage_bytes, from.inputs, stage * kStage, first_token, full + slot, stays());
  }
};

}  // namespace qload::cuda::middle_room
