// A block's two rings: boxes of 64 rows of x, and stages of 128 rows of weights with their scales and zero points.
#pragma once

#include "../device/ring.cuh"
#include "../device/scaled_codes.cuh"
#include "many.h"

namespace qload::cuda::many_room {

constexpr int kBox = 64, kStage = 128, kTile = 64;      // rows of a slot of x, and of weights; columns of a tile
constexpr int kMostBoxes = 24, kMostStages = 12;        // slots
constexpr int kFill = 128;                              // threads that fill
constexpr int kTransposeTokens = 16;                         // tokens of y that a group of four warps transposes at a time
constexpr int kTransposeBytes = 2 * kTransposeTokens * kTile * 2;  // of a group, twice
constexpr int kPieceBytes = 2048;                       // unit of a lane's loads: 64 rows of a tile of 4 bits, 32 of 8

/// Zero points of integers: all the same, one of each column in a group, or offsets in their place.
enum class Zeros : int { kSame, kPoints, kOffsets };

constexpr __host__ __device__ int tile_bytes(int bits) { return kStage * kTile * bits / 8; }  // of a stage

/// Strips of 64 columns per group of four warps, with two groups in a block or one for each strip; and the number of
/// multiplying threads, of a team and in total.
constexpr __host__ __device__ int strips_of(int columns, int teams) {
  return teams == 1 && columns % (2 * kTile) == 0 ? columns / (2 * kTile) : 1;
}
constexpr __host__ __device__ int team_threads(int columns, int teams) { return columns / kTile / strips_of(columns, teams) * 128; }
constexpr __host__ __device__ int multiplying(int columns, int teams) { return teams * team_threads(columns, teams); }

/// Descriptors of copied boxes: x as (M, inputs), weights as (N / 64, K * bits / 16, 32 words). Boxes of x beyond the last
/// token would be slow, so an incomplete last tile has a box of its own size.
struct Matrices {
  CUtensorMap inputs, last_inputs, weights;
};

struct Work {  // the division of a layer by a launch
  int boxes, stages;                           // slots
  int items, wholes;                           // tiles, and the number of tiles that are not shared; for experts `items` is the maximum
  int places;                                  // blocks that run at once
  int tall, wide;                              // number of tiles of tokens, and of columns of one or two neighbours
  int each[2], more[2];                        // stages of K of a share, and number of shares with one more: for one block,
                                               // and for two blocks that share rows
  int weights_at, scales_at, zeros_at, transpose_at;  // offsets of the slots in bytes; those of x begin at 0
  int scale_bytes, zero_bytes;                 // of a slot
  int group, group_rows;                       // rows of a group, and groups that begin in a stage
};

/// First tile of a block, or of two, and number of tiles in progress at the same time.
__device__ __forceinline__ int first_item() { return blockIdx.y * gridDim.z + blockIdx.z; }
__device__ __forceinline__ int items_together() { return gridDim.y * gridDim.z; }

/// Tokens, columns and stages of a tile.
struct Place {
  int row, slice, column, first, last;
  bool shares_x, shares_rows;

  /// Tiles of tokens are consecutive within kTogether of them, so that concurrent blocks read few rows of x and few
  /// columns.
  template <class OwnRows>
  __device__ __forceinline__ Place(const Many& call, const Work& work, const OwnRows& rows, int columns, int item) {
    shares_rows = item >= work.wholes, shares_x = call.neighbours && !shares_rows;
    const bool of_last_turn = rows.in_halves(call), half = of_last_turn || (call.neighbours && shares_rows);
    const int tall = rows.tall, wholes = of_last_turn ? 0 : work.wholes;  // of this launch
    int tile = half ? rows.before + wholes + (item - wholes) / 2 : item;
    const int right = half ? (item - wholes) % 2 : shares_x ? blockIdx.x : 0;
    slice = row = 0;  // a division takes as long as hundreds of additions, and delays the first copy
    if (call.slices > 1) {
      const unsigned slices = call.slices, whole = unsigned(tile) / slices;
      slice = tile - whole * slices, tile = whole;
    }
    if (tall > 1) {
      const int above = tile / (kTogether * work.wide) * kTogether, height = min(kTogether, tall - above);
      tile -= above * work.wide;
      row = above + tile % height, tile /= height;
    }
    column = (tile * (call.neighbours || of_last_turn ? 2 : 1) + right) * columns;
    const int share = shares_rows ? slice * 2 + blockIdx.x : slice, more = work.more[shares_rows];
    first = work.each[shares_rows] * share + min(share, more), last = first + work.each[shares_rows] + (share < more);
  }

 private:
  static constexpr int kTogether = 8;
};

/// Rows of x and expert of a tile. `tall`: tiles of tokens; `items`: tiles of the launch, or halves of tiles after
/// `before` whole ones of another launch.
template <bool grouped, int tokens>
struct Rows {
  static constexpr bool may_be_part = true;  // of K
  static constexpr int before = 0;
  int tall, items;

  __device__ __forceinline__ Rows(const Many& call, const Work& work)
      : tall(work.tall), items(work.items), end_(call.M) {}
  static __device__ __forceinline__ bool in_halves(const Many&) { return false; }

  __device__ __forceinline__ void enter(int row) { first_ = row * tokens; }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int end() const { return end_; }
  __device__ __forceinline__ int expert() const { return 0; }

 private:
  int end_, first_ = 0;
};

template <int tokens>
struct Rows<true, tokens> {
  static constexpr bool may_be_part = false;
  int tall, items, before;

  /// Every item, and one after the last, stores the number of items.
  __device__ __forceinline__ Rows(const Many& call, const Work& work) : from_(call.items) {
    enter(0);
    tall = item_.w, items = tall * work.wide, before = 0;
    if (call.turns == Turns::kAll) return;
    const int last = items % work.places, left = 2 * last <= work.places ? last : 0;
    before = items - left, items = call.turns == Turns::kWhole ? before : 2 * left;
  }
  static __device__ __forceinline__ bool in_halves(const Many& call) { return call.turns == Turns::kLast; }

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

/// Barriers of the slots: data have arrived, or are free.
struct Barriers {
  uint64_t x_arrived[kMostBoxes], x_free[kMostBoxes], arrived[kMostStages], free[kMostStages];
  uint64_t sums_arrived;  // for sums of the block that shares rows of K
};

/// Initialize barriers, before all threads of the block or cluster synchronize; `threads`: of a team.
__device__ __forceinline__ void start_rings(const Many& call, const Work& work, Barriers& barriers, int threads) {
  if (threadIdx.x < work.boxes) {
    start_barrier(barriers.x_arrived + threadIdx.x, 1);
    start_barrier(barriers.x_free + threadIdx.x, threads / 32 * (call.neighbours ? 2 : 1));
  } else if (threadIdx.x >= 32 && threadIdx.x < 32 + work.stages) {
    start_barrier(barriers.arrived + threadIdx.x - 32, 1);
    start_barrier(barriers.free + threadIdx.x - 32, threads / 32);
  } else if (threadIdx.x == 31) {
    start_barrier(&barriers.sums_arrived, 1);
  }
  if (threadIdx.x < 64) publish_barriers();
}

/// A slot of a ring and the parity of its phase, as counted in turns.
struct Slot {
  int at = 0, parity = 0;

  template <int steps = 1>
  __device__ __forceinline__ void advance(int slots) {
    at += steps;
    if (at >= slots) at -= slots, parity ^= 1;
  }
};

/// The two threads that fill the rings: one calls `weights`, another `inputs`. All warps wait for them, and nothing hides
/// their latency, so they do little more than start copies.
/// `box`: elements of x in 128 bytes.
template <Code code, Zeros zeros_of, bool small, int tokens, int columns, int teams, bool grouped, int box = kBox>
struct Filling {
  static constexpr int bits = bits_of(code);
  static constexpr bool has_zeros = zeros_of != Zeros::kSame;
  static constexpr int zero_bits = zero_width(bits, zeros_of == Zeros::kOffsets);
  static constexpr int kStageBytes = columns / kTile * tile_bytes(bits);

  const Matrices& from;
  const Many& call;
  const Work& work;
  Rows<grouped, tokens> rows;
  unsigned char* memory;
  Barriers& barriers;

  /// Weights never depend on the previous kernel, except for the choice of experts.
  __device__ __forceinline__ void weights() {
    const uint64_t policy = rows.tall == 1 ? evict_first_policy() : evict_normal_policy();
    const uint32_t first = opaque(shared_address(memory)), arrived = opaque(shared_address(barriers.arrived));
    const uint32_t free = opaque(shared_address(barriers.free));
    const bool groups = (small && zeros_of != Zeros::kOffsets) || work.group < call.K;
    const int group_rows = small ? work.group_rows : 1;
    const int of_column = is_scaled(code) ? column_scale_bytes(code, work.group) : is_number(code) ? 0 : 2;
    const int64_t scale_pitch = int64_t{call.N} * of_column, zero_pitch = int64_t{call.N} * zero_bits / 8;
    Slot slot;
#pragma unroll 1
    for (int item = first_item(); item < rows.items; item += items_together()) {
      const Place place(call, work, rows, columns, item);
      rows.enter(place.row);
      const int there = max(0, min(columns, call.N - place.column));  // columns with scales
      const int scale_bytes = there * of_column, zero_bytes = has_zeros ? there * zero_bits / 8 : 0;
      const int beside = group_rows * (scale_bytes + zero_bytes);
      const int tile = place.column / kTile + (grouped ? rows.expert() * (call.N / kTile) : 0);
      const int of_expert = !groups ? 1 : is_scaled(code) ? call.K / kStage : call.K / work.group;  // rows of scales
      const int64_t group = (groups ? place.first * group_rows : 0) + (grouped ? int64_t{rows.expert()} * of_expert : 0);
      const auto* scales = static_cast<const unsigned char*>(call.scales) + group * scale_pitch + place.column * of_column;
      const auto* zeros = static_cast<const unsigned char*>(call.zeros) + group * zero_pitch + place.column * zero_bits / 8;
      int line = place.first * (kStage * bits / 16);
#pragma unroll 1
      for (int stage = place.first; stage < place.last; ++stage, line += kStage * bits / 16) {
        wait_for(free + slot.at * 8, slot.parity ^ 1);  // before the first phase ends, the one before it counts as ended
        const uint32_t here = arrived + slot.at * 8;
        const bool begins = scale_bytes > 0 && (groups || stage < place.first + teams);
        expect_bytes(here, kStageBytes + (begins ? beside : 0));
        copy_box(first + work.weights_at + slot.at * kStageBytes, from.weights, 0, line, tile, here, policy);
        if (begins) {
          const uint32_t to = first + work.scales_at + slot.at * work.scale_bytes;
#pragma unroll 1
          for (int row = 0; row < group_rows; ++row)
            copy_bytes(to + row * columns * 2, scales + row * scale_pitch, scale_bytes, here, policy);
          if constexpr (has_zeros)
#pragma unroll 1
            for (int row = 0; row < group_rows; ++row)
              copy_bytes(first + work.zeros_at + slot.at * work.zero_bytes + row * columns * zero_bits / 8,
                         zeros + row * zero_pitch, zero_bytes, here, policy);
          if (groups) scales += group_rows * scale_pitch, zeros += group_rows * zero_pitch;
        }
        slot.advance(work.stages);
      }
    }
  }

  __device__ __forceinline__ void inputs() {
    const uint64_t policy = evict_normal_policy();
    const uint32_t first = opaque(shared_address(memory)), arrived = opaque(shared_address(barriers.x_arrived));
    const uint32_t free = opaque(shared_address(barriers.x_free));
    Slot slot;
#pragma unroll 1
    for (int item = first_item(); item < rows.items; item += items_together()) {
      const Place place(call, work, rows, columns, item);
      rows.enter(place.row);
      // Each neighbour copies one half of the tokens, for both.
      const bool shares = !grouped && place.shares_x;
      const int rows_of_box = !grouped && call.neighbours ? tokens / 2 : tokens;
      const int left = grouped ? tokens : min(tokens, call.M - rows.first());
      const int begin = shares ? blockIdx.x * rows_of_box : 0, end = min(left, shares ? begin + rows_of_box : tokens);
      const bool any = begin < end, two = begin + rows_of_box < end;  // boxes of x for one slot
      const CUtensorMap& x = left - begin >= rows_of_box ? from.inputs : from.last_inputs;
      const CUtensorMap& second = left - begin >= 2 * rows_of_box ? from.inputs : from.last_inputs;
      const int row = rows.first() + begin;
      if (item == first_item() && !rows.in_halves(call)) wait_for_earlier_kernels();
#pragma unroll 1
      for (int column = place.first * kStage; column < place.last * kStage; column += box) {
        wait_for(free + slot.at * 8, slot.parity ^ 1);
        const uint32_t here = arrived + slot.at * 8, to = first + (slot.at * tokens + begin) * (kBox * 2);
        expect_bytes(here, left * kBox * 2);
        if (shares) {
          if (any) copy_box_to(3, to, x, column, row, here, policy);
        } else {
          copy_box(to, x, column, row, here, policy);
          if (two) copy_box(to + rows_of_box * (kBox * 2), second, column, row + rows_of_box, here, policy);
        }
        slot.advance(work.boxes);
      }
    }
  }
};

}  // namespace qload::cuda::many_room
