// A block's two rings: boxes of 64 rows of x, and stages of 128 rows of weights with their scales and zero points.
#pragma once

#include "../device/ring.cuh"
#include "many.h"

namespace qload::cuda::many_room {

constexpr int kBox = 64, kStage = 128, kTile = 64;      // rows of x of a slot, and of weights; columns of a tile
constexpr int kMostBoxes = 24, kMostStages = 12;        // slots
constexpr int kMultiply = 256, kFill = 128;             // threads: two groups of four warps multiply, one fills
constexpr int kTurnTokens = 16;                         // of y that a group of four warps turns at a time
constexpr int kTurnBytes = 2 * 2 * kTurnTokens * kTile * 2;  // of both groups, twice
constexpr int kPieceBytes = 2048;                       // what lanes take at once: 64 rows of a tile of 4 bits, 32 of 8

constexpr int tile_bytes(int bits) { return kStage * kTile * bits / 8; }  // of a stage

/// What copies read in boxes: x as (M, inputs), weights as (N / 64, K * bits / 16, 32 words). Boxes of x that reach beyond the
/// last token would take long: of a last tile that is not whole there is another size.
struct Matrices {
  CUtensorMap inputs, last_inputs, weights;
};

struct Work {  // how a launch divides a layer
  int boxes, stages;                           // slots
  int items, wholes;                           // tiles, and how many of them are not shared; of experts `items` at most
  int tall, wide;                              // tiles of tokens, and of columns of one or two neighbours
  int all;                                     // stages of K
  int weights_at, scales_at, zeros_at, turn_at;  // bytes, where slots of these begin; of x at 0
  int scale_bytes, zero_bytes;                 // of a slot
  int group, group_rows;                       // rows of a group, and groups that begin in a stage or are all of it
};

/// The first tile of a block, or of two, and how many others have theirs at the same time.
__device__ __forceinline__ int first_item() { return blockIdx.y * gridDim.z + blockIdx.z; }
__device__ __forceinline__ int items_together() { return gridDim.y * gridDim.z; }

/// Which tokens, columns and stages a block has next.
struct Place {
  int row, slice, column, first, last;
  bool shares_x, shares_rows;

  /// Tiles of tokens follow each other within kTogether of them, so that blocks at the same time read few rows of x and
  /// few columns.
  __device__ __forceinline__ Place(const Many& call, const Work& work, int tall, int columns, int item) {
    shares_rows = item >= work.wholes, shares_x = call.neighbours && !shares_rows;
    const bool half = call.neighbours && shares_rows;  // of what neighbours have
    int tile = half ? work.wholes + (item - work.wholes) / 2 : item;
    const int right = half ? (item - work.wholes) % 2 : shares_x ? blockIdx.x : 0;
    slice = tile % call.slices, tile /= call.slices;
    const int before = tile / (kTogether * work.wide) * kTogether, height = min(kTogether, tall - before);
    tile -= before * work.wide;
    row = before + tile % height, column = (tile / height * (call.neighbours ? 2 : 1) + right) * columns;
    const int share = shares_rows ? slice * 2 + blockIdx.x : slice, shares = call.slices * (shares_rows ? 2 : 1);
    first = work.all * share / shares, last = work.all * (share + 1) / shares;
  }

 private:
  static constexpr int kTogether = 8;
};

/// Which rows of x a tile has, and of which expert. `tall`: tiles of tokens, and `items` all tiles.
template <bool grouped, int tokens>
struct Rows {
  int tall, items;

  __device__ __forceinline__ Rows(const Many& call, const Work& work)
      : tall(work.tall), items(work.items), end_(call.M) {}

  __device__ __forceinline__ void enter(int row) { first_ = row * tokens; }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int end() const { return end_; }
  __device__ __forceinline__ int expert() const { return 0; }

 private:
  int end_, first_ = 0;
};

template <int tokens>
struct Rows<true, tokens> {
  int tall, items;

  /// Each item, and one more, says how many there are.
  __device__ __forceinline__ Rows(const Many& call, const Work& work) : from_(call.items) {
    enter(0);
    tall = item_.w, items = tall * work.wide;
  }

  __device__ __forceinline__ void enter(int row) {
    item_ = __ldcg(reinterpret_cast<const int4*>(from_ + int64_t{row} * (4 + tokens)));
  }
  __device__ __forceinline__ int first() const { return item_.y; }
  __device__ __forceinline__ int end() const { return item_.y + item_.z; }
  __device__ __forceinline__ int expert() const { return item_.x; }

 private:
  const int32_t* from_;
  int4 item_;
};

/// Barriers of the slots: what is asked for has come, and nobody reads it any more.
struct Barriers {
  uint64_t x_came[kMostBoxes], x_free[kMostBoxes], came[kMostStages], free[kMostStages];
  uint64_t sums_came;  // of the block that shares rows of K
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
  Rows<grouped, tokens> rows;
  unsigned char* memory;
  Barriers& barriers;

  /// Weights never depend on the kernel ahead, but for which experts' they are.
  __device__ __forceinline__ void weights() {
    const uint64_t policy = rows.tall == 1 ? leaves_first() : stays();
    Slot slot;
    int unused = work.stages;
#pragma unroll 1
    for (int item = first_item(); item < rows.items; item += items_together()) {
      const Place place(call, work, rows.tall, columns, item);
      rows.enter(place.row);
#pragma unroll 1
      for (int stage = place.first; stage < place.last; ++stage) {
        if (unused > 0)
          --unused;
        else
          wait_for(barriers.free + slot.at, slot.parity ^ 1);
        ask(place, stage, slot.at, policy);
        slot.advance(work.stages);
      }
    }
  }

  __device__ __forceinline__ void inputs() {
    const uint64_t policy = stays();
    Slot slot;
    int unused = work.boxes;
#pragma unroll 1
    for (int item = first_item(); item < rows.items; item += items_together()) {
      const Place place(call, work, rows.tall, columns, item);
      rows.enter(place.row);
      // Each neighbour fetches one half of the tokens, for both.
      const bool shares = !grouped && place.shares_x;
      const int rows_of_box = !grouped && call.neighbours ? tokens / 2 : tokens;
      const int left = grouped ? tokens : min(tokens, call.M - rows.first());
      const int begin = shares ? blockIdx.x * rows_of_box : 0, end = min(left, shares ? begin + rows_of_box : tokens);
      if (item == first_item()) wait_for_earlier_kernels();
#pragma unroll 1
      for (int box = 2 * place.first; box < 2 * place.last; ++box) {
        if (unused > 0)
          --unused;
        else
          wait_for(barriers.x_free + slot.at, slot.parity ^ 1);
        uint64_t* came = barriers.x_came + slot.at;
        expect_bytes(came, left * kBox * 2);
#pragma unroll 1
        for (int own = begin; own < end; own += rows_of_box) {
          const CUtensorMap& x = left - own >= rows_of_box ? from.inputs : from.last_inputs;
          unsigned char* to = memory + (slot.at * tokens + own) * (kBox * 2);
          if (shares)
            copy_box_to(3, to, x, box * kBox, rows.first() + own, came, policy);
          else
            copy_box(to, x, box * kBox, rows.first() + own, came, policy);
        }
        slot.advance(work.boxes);
      }
    }
  }

 private:
  __device__ __forceinline__ void ask(const Place& place, int stage, int slot, uint64_t policy) const {
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
