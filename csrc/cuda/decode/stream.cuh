// The weights of one warp, and the scales and zero points of its groups, asked for ahead of their use.
#pragma once

#include <cstring>
#include <type_traits>

#include "../device/ptx.cuh"
#include "../device/scaled_codes.cuh"
#include "decode.h"
#include "division.h"
#include "operands.cuh"

namespace qload::cuda {

/// 16 bytes of each lane at a time, `kept` of them on their way; chunks `turn` apart of one tile of 64 columns.
template <int bits, Order order, int kept>
class Words {
 public:
  static constexpr int kPieces = 2 * bits;  // of a chunk
  // All of a chunk: pieces are used where they came, and the next chunk's come there after the last use.
  static constexpr bool kInPlace = order == Order::kOwn && kept == kPieces;

  __device__ __forceinline__ Words(const Decode& call, int tile, int chunk, int turn)
      : rows_left_(call.K - chunk * kChunk), turn_rows_(turn * kChunk) {
    const int lane = threadIdx.x % 32;
    step_ = order == Order::kOwn ? 1024 * bits : call.N * 2 * bits;
    turn_step_ = order == Order::kOwn ? int64_t{turn} * step_ : int64_t{8} * (turn - 1) * step_;
    const int64_t first = order == Order::kOwn ? (int64_t{tile} * (call.K / kChunk) + chunk) * step_ + lane * 16
                                               : int64_t{8} * chunk * step_ + tile * (128 * bits) + lane * (4 * bits);
    at_ = as_it_is(static_cast<const unsigned char*>(call.weights) + first);
  }

  __device__ __forceinline__ void ask_first() {
#pragma unroll
    for (int i = 0; i < kept; ++i) load(i, held_[i]);
  }
  /// Piece `i` of this chunk; its register is for the piece `kept` later, of the next chunk if there are `more`.
  __device__ __forceinline__ void take(int i, bool more, uint32_t (&to)[4]) {
#pragma unroll
    for (int word = 0; word < 4; ++word) to[word] = held_[i % kept][word];
    leave(i, more);
  }
  /// The same where it lies, until it is left.
  __device__ __forceinline__ const uint32_t (&piece(int i) const)[4] { return held_[i]; }
  __device__ __forceinline__ void leave(int i, bool more) {
    if (i + kept < kPieces || more) load((i + kept) % kPieces, held_[i % kept]);
  }

 private:
  /// One after another, chunk after chunk.
  __device__ __forceinline__ void load(int i, uint32_t (&to)[4]) {
    const uint4 piece = next(i);
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
  }
  __device__ __forceinline__ uint4 next(int i) {
    if constexpr (order == Order::kOwn) {
      const uint4 piece = load_once(reinterpret_cast<const uint4*>(at_ + i * 512));
      if (i == kPieces - 1) at_ = as_it_is(at_ + turn_step_);
      return piece;
    }
    // Of 8 bits two pieces lie together, and what the memory gives at once is both: from the L1.
    const bool first = bits == 8 && i % 2 == 0;
    const uint4* from = reinterpret_cast<const uint4*>(at_ + (bits == 8 && !first ? 16 : 0));
    const uint4 piece = bits == 8 ? __ldg(from) : load_once(from);
    if (first) return piece;
    int64_t on = step_;
    // Where there is no second half, the first is read again: x is zero there.
    if (i == kPieces / 2 - 1 && rows_left_ <= kChunk / 2) on -= 4 * step_;
    if (i == kPieces - 1) on += turn_step_, rows_left_ -= turn_rows_;
    at_ = as_it_is(at_ + on);
    return piece;
  }

  const unsigned char* at_;
  int64_t step_, turn_step_;  // bytes: 16 rows, or a chunk in our own order; what a turn adds
  int rows_left_, turn_rows_;
  uint32_t held_[kept][4];
};

/// Scales of columns c + 8b + 16j as 2j + b, and words with their zero points. Those of the next group come into the
/// registers of those that are done with: a copy of them would wait for memory. Of small groups that is a step of 32
/// rows ahead or two, too late for the memory but not for the L2, into which they are fetched a chunk ahead.
template <class T, int bits>
class Scales {
 public:
  __device__ __forceinline__ Scales(const Decode& call, int tile, int group) : N_(call.N), has_zeros_(call.zeros) {
    const int column = threadIdx.x % 32 / 4;
    groups_left_ = call.group >= call.K ? 1 : call.K / call.group - group;
    const int64_t at = int64_t{group} * call.N + tile * kTileN;
    scales_ = as_it_is(static_cast<const T*>(call.scales) + at + column * 8);
    zeros_at_ = as_it_is(static_cast<const uint32_t*>(call.zeros) + at * bits / 32 + column * (bits / 4));
  }

  /// Those of the first group; small ones that follow are fetched.
  template <bool small>
  __device__ __forceinline__ void ask_first(const Chunks& work) {
    if (!work.chunk_step) return ask_per_column();
    ask();
    if constexpr (small) {
      for (int i = 1; i < __popc(work.ends); ++i) fetch(i);
      fetch(work.turn_groups);
    }
  }
  /// The group is done with; that `step` on is asked for. 0: it is the same. `turn_groups`: those of a small one in the
  /// warp's next chunk are fetched.
  __device__ __forceinline__ void advance(int step, int turn_groups = 0) {
    if (step == 0) return;
    groups_left_ -= step;
    scales_ = as_it_is(scales_ + int64_t{step} * N_);
    if (has_zeros_) zeros_at_ = as_it_is(zeros_at_ + int64_t{step} * N_ * bits / 32);
    ask();
    if (turn_groups) fetch(turn_groups);
  }

  /// Scales of the group as they are stored, columns 16j + c and 16j + c + 8 side by side.
  __device__ __forceinline__ void pairs(uint32_t (&to)[4]) const {
    to[0] = held_.x, to[1] = held_.y, to[2] = held_.z, to[3] = held_.w;
  }

  /// sums += scale * (products with codes - zero point * sum of x); `sixteenth`: those of b = 1 are 16 times too large.
  template <bool has_zeros, bool sixteenth, int token_tiles>
  __device__ __forceinline__ void add(const float (&products)[4][token_tiles][4], const float (&x_sum)[token_tiles][2],
                                      float (&sum)[4][token_tiles][4]) const {
    T own[8];
    memcpy(own, &held_, sizeof own);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        constexpr float kTimes[2] = {1, sixteenth ? 16 : 1};
        const float scale = wide(own[2 * j + b]) * (1 / kTimes[b]);
        float off = Codes<T, Code{bits}>::kOffset + (1 << (bits - 1));
        if (has_zeros) off = Codes<T, Code{bits}>::kOffset + float_of(zero_of<bits>(zeros_, j, b));
        off *= kTimes[b];
#pragma unroll
        for (int m = 0; m < token_tiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& to = sum[j][m][2 * b + i];  // as `+=` the compiler shares the last addition between both cases
            to = fmaf(scale, fmaf(-off, x_sum[m][i], products[j][m][2 * b + i]), to);
          }
      }
  }

 private:
  __device__ __forceinline__ void ask() {
    if (groups_left_ <= 0) return;
    held_ = __ldg(reinterpret_cast<const uint4*>(scales_));
    ask_zeros();
  }
  /// Where one scale serves a column.
  __device__ __forceinline__ void ask_per_column() {
    const int column = threadIdx.x % 32 / 4;
    held_ = scales_per_column(scales_ - column * 8, column);
    ask_zeros();
  }
  /// Those of so many groups on.
  __device__ __forceinline__ void fetch(int groups) const {
    if (groups >= groups_left_) return;
    fetch_near(scales_ + int64_t{groups} * N_);
    if (has_zeros_) fetch_near(zeros_at_ + int64_t{groups} * N_ * bits / 32);
  }
  __device__ __forceinline__ void ask_zeros() {
    if (!has_zeros_) return;
#pragma unroll
    for (int i = 0; i < bits / 4; ++i) zeros_[i] = __ldg(zeros_at_ + i);
  }

  const T* scales_;
  const uint32_t* zeros_at_;
  int N_, groups_left_;
  bool has_zeros_;
  uint4 held_{};
  uint32_t zeros_[bits / 4];
};

/// Scales of columns c + 8b + 16j as 2j + b, of groups of any size, and offsets. Of 16 bits scales are on their way as
/// above; offsets, and scales in fp32, wait in the L1: there are no registers for them.
template <class T, int bits>
class OffsetScales {
 public:
  __device__ __forceinline__ OffsetScales(const Decode& call, int tile, int group)
      : N_(call.N), zero_(call.offset_zero), wide_(call.wide) {
    const int column = threadIdx.x % 32 / 4;
    groups_left_ = call.group >= call.K ? 1 : call.K / call.group - group;
    const int64_t first = (int64_t{group} * call.N + tile * kTileN) * words_of(8) / 8 + column * words_of(8);
    scales_ = as_it_is(static_cast<const uint32_t*>(call.scales) + first);
    offsets_ = as_it_is(static_cast<const uint32_t*>(call.zeros) + first);
  }

  template <bool>
  __device__ __forceinline__ void ask_first(const Chunks& work) {
    if (work.chunk_step || wide_) {
      ask();
    } else {  // where one scale serves a column, scales are in another order
      const int column = threadIdx.x % 32 / 4;
      held_ = scales_per_column(reinterpret_cast<const T*>(scales_) - column * 8, column);
      fetch_nearest(offsets_);
    }
    for (int i = 1; i < __popc(work.ends); ++i) fetch(i);
    fetch(work.turn_groups);
  }
  /// As of Scales.
  __device__ __forceinline__ void advance(int step, int turn_groups) {
    if (step == 0) return;
    groups_left_ -= step;
    const int64_t words = int64_t{step} * words_of(N_);
    scales_ = as_it_is(scales_ + words), offsets_ = as_it_is(offsets_ + words);
    ask();
    if (turn_groups) fetch(turn_groups);
  }

  /// sums += scale * (products with codes - zero point * sum of x) - offset * sum of x
  template <bool sixteenth, int token_tiles>
  __device__ __forceinline__ void add(const float (&products)[4][token_tiles][4], const float (&x_sum)[token_tiles][2],
                                      float (&sum)[4][token_tiles][4]) const {
    float scales[8], offsets[8];
    if (wide_) {
      load(scales_, scales), load(offsets_, offsets);
    } else {
      widen(held_, scales), widen(__ldg(reinterpret_cast<const uint4*>(offsets_)), offsets);
    }
    const float zero = Codes<T, Code{bits}>::kOffset + zero_;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float times = sixteenth && i % 2 ? 16 : 1, scale = scales[i] * (1 / times), off = zero * times;
#pragma unroll
      for (int m = 0; m < token_tiles; ++m)
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          const int at = i % 2 * 2 + token;
          float& to = sum[i / 2][m][at];
          to = fmaf(scale, fmaf(-off, x_sum[m][token], products[i / 2][m][at]), to);
          to = fmaf(-offsets[i], x_sum[m][token], to);
        }
    }
  }

 private:
  /// Words of so many scales.
  __device__ __forceinline__ int words_of(int scales) const { return wide_ ? scales : scales / 2; }

  __device__ __forceinline__ void ask() {
    if (groups_left_ <= 0) return;
    if (wide_)
      fetch_nearest(scales_);
    else
      held_ = __ldg(reinterpret_cast<const uint4*>(scales_));
    fetch_nearest(offsets_);
  }
  __device__ __forceinline__ void fetch(int groups) const {
    if (groups >= groups_left_) return;
    const int64_t words = int64_t{groups} * words_of(N_);
    fetch_near(scales_ + words), fetch_near(offsets_ + words);
  }
  static __device__ __forceinline__ void load(const uint32_t* from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from) + i);
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  }
  static __device__ __forceinline__ void widen(uint4 stored, float (&to)[8]) {
    T own[8];
    memcpy(own, &stored, sizeof own);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = wide(own[i]);
  }

  const uint32_t *scales_, *offsets_;
  int N_, zero_, groups_left_;
  bool wide_;
  uint4 held_{};
};

/// Scales of a lane's columns c + 8i in fp32, which multiply sums.
class ColumnScales {
 public:
  /// `at`: column c's.
  __device__ __forceinline__ void ask_columns(const float* at, float unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) column_[i] = at ? unit * __ldg(at + 8 * i) : unit;
  }
  /// Sums times the scales of their columns.
  template <int token_tiles>
  __device__ __forceinline__ void leave(float (&sum)[4][token_tiles][4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int m = 0; m < token_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j][m][i] *= column_[2 * j + i / 2];
  }

 private:
  float column_[8];
};

/// Scales of numbers in fp32: of each column, or of each chunk of the tile. The next chunk's is on its way.
class TileScales : public ColumnScales {
 public:
  __device__ __forceinline__ TileScales(const Decode& call, int tile, int chunk) : of_tiles_(call.group < call.K) {
    const int tiles = call.N / kTileN, own = tile * kTileN + threadIdx.x % 32 / 4;
    at_ = as_it_is(static_cast<const float*>(call.scales) + (of_tiles_ ? chunk * tiles + tile : own));
    step_ = tiles;
  }

  /// `turn`: chunks to the warp's next.
  __device__ __forceinline__ void ask_first(int turn) {
    step_ *= turn;
    ask_columns(of_tiles_ ? nullptr : at_, 1);
    if (of_tiles_) next_ = __ldg(at_);
  }
  /// A chunk begins; are there more?
  __device__ __forceinline__ void enter(bool more) {
    scale_ = next_;
    if (!of_tiles_ || !more) return;
    at_ = as_it_is(at_ + step_);
    next_ = __ldg(at_);
  }
  /// sums += scale of the chunk * products
  template <int token_tiles>
  __device__ __forceinline__ void add(const float (&products)[4][token_tiles][4], float (&sum)[4][token_tiles][4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int m = 0; m < token_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j][m][i] = fmaf(scale_, products[j][m][i], sum[j][m][i]);
  }

 private:
  const float* at_;
  int step_;
  bool of_tiles_;
  float scale_, next_ = 1;
};

/// Scales of numbers of four bits: of groups, which multiply operands, those of the next chunk on their way; and of columns in
/// fp32, which multiply sums.
template <class T, Code code>
class GroupScales : public ColumnScales {
 public:
  using Scaled = ScaledCodes<T, code>;

  __device__ __forceinline__ GroupScales(const Decode& call, int tile, int chunk) : codes_(call.code), group_(call.group) {
    const int of_column = column_scale_bytes(call.code, group_), c = threadIdx.x % 32 / 4;
    step_ = call.N * of_column, apart_ = 16 * of_column;
    at_ = as_it_is(static_cast<const unsigned char*>(call.scales) + int64_t{chunk} * step_ + tile * (kTileN * of_column) +
                   c * (2 * of_column));
    columns_ = static_cast<const float*>(call.zeros) + tile * kTileN + c;
  }

  /// `turn`: chunks to the warp's next.
  __device__ __forceinline__ void ask_first(int turn) {
    step_ *= turn;
    ask_columns(columns_, Scaled::kUnit);
    ask();
  }
  /// A chunk begins; are there more?
  __device__ __forceinline__ void enter(bool more) {
#pragma unroll
    for (int j = 0; j < 4; ++j) now_[j] = Scaled::kept(next_[j]);
    if (!more) return;
    at_ = as_it_is(at_ + step_);
    ask();
  }
  /// Two operands of 16 rows, of columns 16j + c and 16j + c + 8, in step `step` of the chunk.
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int j, uint32_t (&to)[2][4]) const {
    const uint32_t scales = Scaled::of_rows(now_[j], step);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      uint32_t* both = to[u / 2] + u % 2 * 2;
      codes_.pair(words[u], step % 2, scales, both[0], both[1]);
    }
  }

 private:
  __device__ __forceinline__ void ask() {
#pragma unroll
    for (int j = 0; j < 4; ++j) next_[j] = Scaled::ask(at_ + j * apart_, group_, threadIdx.x % 4 / 2);
  }

  Scaled codes_;
  int group_;
  const unsigned char* at_;
  const float* columns_;
  int step_, apart_;  // bytes to the next chunk, and to the next 16 columns
  uint2 now_[4];
  typename Scaled::Asked next_[4];
};

/// Class of scales for a kind of groups.
template <class T, Code code, Groups groups>
using ScalesOf = std::conditional_t<
    groups == Groups::kScaled, GroupScales<T, code>,
    std::conditional_t<groups == Groups::kTiles, TileScales,
                       std::conditional_t<groups == Groups::kOffsets, OffsetScales<T, bits_of(code)>, Scales<T, bits_of(code)>>>>;

}  // namespace qload::cuda
