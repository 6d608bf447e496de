// A block's two rings: boxes of 64 rows of x, and stages of 128 rows of weights with their scales and zero points.
#pragma once

#include "../device/ring.cuh"
#include "many.h"

namespace qload::cuda::many_room {

constexpr int kBox = 64, kStage = 128, kTile = 64;      // rows of x of a slot, and of weights; columns of a tile
constexpr int kMostBoxes = 24, kMostStages = 12;        // slots
constexpr int kMultiply = 256, kFill = 128;             // threads: two groups of four warps that multiply, and one that fills
constexpr int kPieceBytes = 2048;                       // what lanes take at once: 64 rows of a tile of 4 bits, 32 of 8

constexpr int tile_bytes(int bits) { return kStage * kTile * bits / 8; }  // of a stage

/// What copies read in boxes: x as (M, inputs), weights as (N / 64, K * bits / 16, 32 words). Boxes of x that reach beyond the
/// last token would take long: of a last tile that is not whole there is another size.
struct Matrices {
  CUtensorMap inputs, last_inputs, weights;
};

struct Work {  // how a launch divides a layer
  int all, shares;                             // stages of K, blocks that share them
  int boxes, stages;                           // slots
  int weights_at, scales_at, zeros_at;         // bytes, where slots of these begin; of x at 0
  int scale_bytes, zero_bytes;                 // of a slot
  int group, group_rows;                       // rows of a group, and groups that begin in a stage or are all of it
};

/// Which columns and stages a block has.
struct Place {
  int slice, column, first, last;

  __device__ __forceinline__ Place(const Many& call, const Work& work, int columns) {
    const bool neighbours = call.neighbours;
    const int tile = blockIdx.z / call.slices;
    slice = blockIdx.z % call.slices, column = (neighbours ? tile * 2 + blockIdx.x : tile) * columns;
    const int share = neighbours ? slice : slice * gridDim.x + blockIdx.x;
    first = work.all * share / work.shares, last = work.all * (share + 1) / work.shares;
  }
};

/// Which rows of x a block has, and of which expert; of no experts those of its place in the grid.
template <bool grouped, int tokens>
struct Rows {
  __device__ __forceinline__ Rows(const Many& call) : call_(call) {}

  __device__ __forceinline__ bool any() const { return true; }
  __device__ __forceinline__ int first() const { return blockIdx.y * tokens; }
  __device__ __forceinline__ int end() const { return call_.M; }
  __device__ __forceinline__ int expert() const { return 0; }

 private:
  const Many& call_;
};

template <int tokens>
struct Rows<true, tokens> {
  __device__ __forceinline__ Rows(const Many& call)
      : item_(__ldcg(reinterpret_cast<const int4*>(call.items + int64_t{blockIdx.y} * (4 + tokens)))) {}

  __device__ __forceinline__ bool any() const { return item_.z > 0; }
  __device__ __forceinline__ int first() const { return item_.y; }
  __device__ __forceinline__ int end() const { return item_.y + item_.z; }
  __device__ __forceinline__ int expert() const { return item_.x; }

 private:
  int4 item_;
};

/// Barriers of the slots: what is asked for has come, and nobody reads it any more.
struct Barriers {
  uint64_t x_came[kMostBoxes], x_free[kMostBoxes], came[kMostStages], free[kMostStages];
};

/// A slot of a ring and the parity of its phase, as counted in turns.
struct Slot {
  int at = 0, parity = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++at == slots) at = 0, parity ^= 1;
  }
};

/// What fills the rings: `weights` of one thread, `inputs` of another.
template <int bits, int tokens, int columns, bool grouped>
struct Filling {
  static constexpr int kStageBytes = columns / kTile * tile_bytes(bits);

  const Matrices& from;
  const Many& call;
  const Work& work;
  const Place& place;
  const Rows<grouped, tokens>& rows;
  unsigned char* memory;
  Barriers& barriers;

  /// Weights never depend on the kernel ahead.
  __device__ __forceinline__ void weights() const {
    const uint64_t policy = gridDim.y == 1 ? leaves_first() : stays();
    Slot slot;
#pragma unroll 1
    for (int stage = place.first; stage < place.last; ++stage) {
      if (stage - place.first >= work.stages) wait_for(barriers.free + slot.at, slot.parity ^ 1);
      ask(stage, slot.at, policy);
      slot.advance(work.stages);
    }
  }

  __device__ __forceinline__ void inputs() const {
    wait_for_earlier_kernels();
    // Each neighbour fetches one half of the tokens, for both.
    const bool neighbours = !grouped && call.neighbours;
    const int left = grouped ? tokens : min(tokens, call.M - rows.first()), bytes = left * kBox * 2;
    const int own = neighbours ? blockIdx.x * (tokens / 2) : 0, end = neighbours ? own + tokens / 2 : tokens;
    const CUtensorMap& x = left >= end ? from.inputs : from.last_inputs;
    const int token = rows.first() + own;
    const uint64_t policy = stays();
    Slot slot;
#pragma unroll 1
    for (int box = 2 * place.first; box < 2 * place.last; ++box) {
      if (box - 2 * place.first >= work.boxes) wait_for(barriers.x_free + slot.at, slot.parity ^ 1);
      uint64_t* came = barriers.x_came + slot.at;
      expect_bytes(came, bytes);
      unsigned char* to = memory + (slot.at * tokens + own) * (kBox * 2);
      if (!neighbours)
        copy_box(to, x, box * kBox, token, came, policy);
      else if (left > own)
        copy_box_to(3, to, x, box * kBox, token, came, policy);
      slot.advance(work.boxes);
    }
  }

 private:
  __device__ __forceinline__ void ask(int stage, int slot, uint64_t policy) const {
    uint64_t* came = barriers.came + slot;
    const bool groups = stage == place.first || stage * kStage % work.group == 0;
    const int there = groups ? max(0, min(columns, call.N - place.column)) : 0;  // columns that have scales
    const int zeros = call.zeros ? there * bits / 8 : 0;
    expect_bytes(came, kStageBytes + work.group_rows * (there * 2 + zeros));
    copy_box(memory + work.weights_at + slot * kStageBytes, from.weights, 0, stage * (kStage * bits / 16),
             place.column / kTile + (grouped ? rows.expert() * (call.N / kTile) : 0), came, policy);
    if (there == 0) return;
    int group = stage * kStage / work.group;
    if (grouped) group += rows.expert() * (work.group < call.K ? call.K / work.group : 1);
#pragma unroll 1
    for (int row = 0; row < work.group_rows; ++row) {
      const int64_t at = int64_t{group + row} * call.N + place.column;
      copy_bytes(memory + work.scales_at + slot * work.scale_bytes + row * columns * 2,
                 static_cast<const unsigned char*>(call.scales) + at * 2, there * 2, came, policy);
      if (zeros)
        copy_bytes(memory + work.zeros_at + slot * work.zero_bytes + row * columns * bits / 8,
                   static_cast<const unsigned char*>(call.zeros) + at * bits / 8, zeros, came, policy);
    }
  }
};

}  // namespace qload::cuda::many_room
