// Loads of one warp's weights, and of the scales and zero points of its groups, ahead of their use.
#pragma once

#include <cstring>
#include <type_traits>

#include "../device/ptx.cuh"
#include "../device/scaled_codes.cuh"
#include "decode.h"
#include "division.h"
#include "operands.cuh"

namespace qload::cuda {

/// Loads of 16 bytes per lane, `kept` of them in flight; chunks `turn` apart of one tile of 64 columns.
template <int bits, Order order, int kept>
class Words {
 public:
  static constexpr int kPieces = 2 * bits;  // of a chunk
  // All of a chunk: a piece is used in the registers of its load, which the next chunk's piece reuses.
  static constexpr bool kInPlace = order == Order::kOwn && kept == kPieces;

  __device__ __forceinline__ Words(const Decode& call, int tile, int chunk, int turn)
      : rows_left_(call.K - chunk * kChunk), turn_rows_(turn * kChunk) {
    const int lane = threadIdx.x % 32;
    step_ = order == Order::kOwn ? 1024 * bits : call.N * 2 * bits;
    turn_step_ = order == Order::kOwn ? int64_t{turn} * step_ : int64_t{8} * (turn - 1) * step_;
    const int64_t first = order == Order::kOwn ? (int64_t{tile} * (call.K / kChunk) + chunk) * step_ + lane * 16
                                               : int64_t{8} * chunk * step_ + tile * (128 * bits) + lane * (4 * bits);
    at_ = opaque(static_cast<const unsigned char*>(call.weights) + first);
  }

  __device__ __forceinline__ void load_first() {
#pragma unroll
    for (int i = 0; i < kept; ++i) load(i, held_[i]);
  }
  /// Copy piece `i` of this chunk and reuse its register for the piece `kept` later, if it or the next chunk exists.
  __device__ __forceinline__ void take(int i, bool more, uint32_t (&to)[4]) {
#pragma unroll
    for (int word = 0; word < 4; ++word) to[word] = held_[i % kept][word];
    leave(i, more);
  }
  /// The same without a copy; `leave` ends its use.
  __device__ __forceinline__ const uint32_t (&piece(int i) const)[4] { return held_[i]; }
  __device__ __forceinline__ void leave(int i, bool more) {
    if (i + kept < kPieces || more) load((i + kept) % kPieces, held_[i % kept]);
  }

 private:
  /// Load the pieces in order, chunk after chunk.
  __device__ __forceinline__ void load(int i, uint32_t (&to)[4]) {
    const uint4 piece = next(i);
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
  }
  __device__ __forceinline__ uint4 next(int i) {
    if constexpr (order == Order::kOwn) {
      const uint4 piece = load_once(reinterpret_cast<const uint4*>(at_ + i * 512));
      if (i == kPieces - 1) at_ = opaque(at_ + turn_step_);
      return piece;
    }
    // With 8 bits two pieces share a memory sector, so the second one comes from the L1.
    const bool first = bits == 8 && i % 2 == 0;
    const uint4* from = reinterpret_cast<const uint4*>(at_ + (bits == 8 && !first ? 16 : 0));
    const uint4 piece = bits == 8 ? __ldg(from) : load_once(from);
    if (first) return piece;
    int64_t on = step_;
    // If there is no second half, the first one is read again: its x is zero.
    if (i == kPieces / 2 - 1 && rows_left_ <= kChunk / 2) on -= 4 * step_;
    if (i == kPieces - 1) on += turn_step_, rows_left_ -= turn_rows_;
    at_ = opaque(at_ + on);
    return piece;
  }

  const unsigned char* at_;
  int64_t step_, turn_step_;  // bytes of 16 rows, or of a chunk in strips; bytes added by a turn
  int rows_left_, turn_rows_;
  uint32_t held_[kept][4];
};

/// Scales of columns c + 8b + 16j as 2j + b, and words with their zero points. The next group is loaded into the same
/// registers after their last use: a copy would wait for memory. With small groups this is only one or two steps of 32
/// rows ahead, late for memory but not for the L2, so groups are prefetched there one chunk ahead.
template <class T, int bits>
class Scales {
 public:
  __device__ __forceinline__ Scales(const Decode& call, int tile, int group) : N_(call.N), has_zeros_(call.zeros) {
    const int column = threadIdx.x % 32 / 4;
    groups_left_ = call.group >= call.K ? 1 : call.K / call.group - group;
    const int64_t at = int64_t{group} * call.N + tile * kTileN;
    scales_ = opaque(static_cast<const T*>(call.scales) + at + column * 8);
    zeros_at_ = opaque(static_cast<const uint32_t*>(call.zeros) + at * bits / 32 + column * (bits / 4));
  }

  /// Load the first group, and prefetch the small ones after it.
  template <bool small>
  __device__ __forceinline__ void load_first(const Chunks& work) {
    if (!work.chunk_step) return load_per_column();
    start_load();
    if constexpr (small) {
      for (int i = 1; i < __popc(work.ends); ++i) fetch(i);
      fetch(work.turn_groups);
    }
  }
  /// Load the group `step` groups later; 0: the same group continues. `turn_groups`: distance to a small group in the
  /// warp's next chunk, to prefetch.
  __device__ __forceinline__ void advance(int step, int turn_groups = 0) {
    if (step == 0) return;
    groups_left_ -= step;
    scales_ = opaque(scales_ + int64_t{step} * N_);
    if (has_zeros_) zeros_at_ = opaque(zeros_at_ + int64_t{step} * N_ * bits / 32);
    start_load();
    if (turn_groups) fetch(turn_groups);
  }

  /// Stored scales of the group, columns 16j + c and 16j + c + 8 side by side.
  __device__ __forceinline__ void pairs(uint32_t (&to)[4]) const {
    to[0] = held_.x, to[1] = held_.y, to[2] = held_.z, to[3] = held_.w;
  }

  /// sums += scale * (products with codes - zero point * sum of x); `sixteenth`: products of b = 1 are 16 times too large.
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
            float& to = sum[j][m][2 * b + i];  // with `+=` the compiler would merge the last addition of both cases
            to = fmaf(scale, fmaf(-off, x_sum[m][i], products[j][m][2 * b + i]), to);
          }
      }
  }

 private:
  __device__ __forceinline__ void start_load() {
    if (groups_left_ <= 0) return;
    held_ = __ldg(reinterpret_cast<const uint4*>(scales_));
    load_zeros();
  }
  /// For one scale per column.
  __device__ __forceinline__ void load_per_column() {
    const int column = threadIdx.x % 32 / 4;
    held_ = scales_per_column(scales_ - column * 8, column);
    load_zeros();
  }
  /// Prefetch the group `groups` groups later.
  __device__ __forceinline__ void fetch(int groups) const {
    if (groups >= groups_left_) return;
    fetch_near(scales_ + int64_t{groups} * N_);
    if (has_zeros_) fetch_near(zeros_at_ + int64_t{groups} * N_ * bits / 32);
  }
  __device__ __forceinline__ void load_zeros() {
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

/// Scales of columns c + 8b + 16j as 2j + b, for groups of any size, and offsets. Scales of 16 bits are in flight as
/// above. Offsets and fp32 scales stay in the L1 until their use: registers lack room for them.
template <class T, int bits>
class OffsetScales {
 public:
  __device__ __forceinline__ OffsetScales(const Decode& call, int tile, int group)
      : N_(call.N), zero_(call.offset_zero), wide_(call.wide) {
    const int column = threadIdx.x % 32 / 4;
    groups_left_ = call.group >= call.K ? 1 : call.K / call.group - group;
    const int64_t first = (int64_t{group} * call.N + tile * kTileN) * words_of(8) / 8 + column * words_of(8);
    scales_ = opaque(static_cast<const uint32_t*>(call.scales) + first);
    offsets_ = opaque(static_cast<const uint32_t*>(call.zeros) + first);
  }

  template <bool>
  __device__ __forceinline__ void load_first(const Chunks& work) {
    if (work.chunk_step || wide_) {
      start_load();
    } else {  // one scale per column has another order
      const int column = threadIdx.x % 32 / 4;
      held_ = scales_per_column(reinterpret_cast<const T*>(scales_) - column * 8, column);
      fetch_nearest(offsets_);
    }
    for (int i = 1; i < __popc(work.ends); ++i) fetch(i);
    fetch(work.turn_groups);
  }
  /// As in Scales.
  __device__ __forceinline__ void advance(int step, int turn_groups) {
    if (step == 0) return;
    groups_left_ -= step;
    const int64_t words = int64_t{step} * words_of(N_);
    scales_ = opaque(scales_ + words), offsets_ = opaque(offsets_ + words);
    start_load();
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
  /// Words of this many scales.
  __device__ __forceinline__ int words_of(int scales) const { return wide_ ? scales : scales / 2; }

  __device__ __forceinline__ void start_load() {
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

/// fp32 scales of a lane's columns c + 8i; they multiply sums.
class ColumnScales {
 public:
  /// `at`: scale of column c.
  __device__ __forceinline__ void load_columns(const float* at, float unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) column_[i] = at ? unit * __ldg(at + 8 * i) : unit;
  }
  /// Multiply sums by the scales of their columns.
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

/// fp32 scales of numbers: one per column, or one for each chunk of the tile, with the next chunk's in flight.
class TileScales : public ColumnScales {
 public:
  __device__ __forceinline__ TileScales(const Decode& call, int tile, int chunk) : of_tiles_(call.group < call.K) {
    const int tiles = call.N / kTileN, own = tile * kTileN + threadIdx.x % 32 / 4;
    at_ = opaque(static_cast<const float*>(call.scales) + (of_tiles_ ? chunk * tiles + tile : own));
    step_ = tiles;
  }

  /// `turn`: chunks to the warp's next one.
  __device__ __forceinline__ void load_first(int turn) {
    step_ *= turn;
    load_columns(of_tiles_ ? nullptr : at_, 1);
    if (of_tiles_) next_ = __ldg(at_);
  }
  /// Begin a chunk; `more`: another one follows.
  __device__ __forceinline__ void enter(bool more) {
    scale_ = next_;
    if (!of_tiles_ || !more) return;
    at_ = opaque(at_ + step_);
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

/// Scales of scaled numbers: by group, which multiply operands, with the next chunk's in flight; and by column in fp32,
/// which multiply sums.
template <class T, Code code>
class GroupScales : public ColumnScales {
 public:
  using Scaled = ScaledCodes<T, code>;

  __device__ __forceinline__ GroupScales(const Decode& call, int tile, int chunk) : codes_(call.code), group_(call.group) {
    const int of_column = column_scale_bytes(call.code, group_), c = threadIdx.x % 32 / 4;
    step_ = call.N * of_column, apart_ = 16 * of_column;
    at_ = opaque(static_cast<const unsigned char*>(call.scales) + int64_t{chunk} * step_ + tile * (kTileN * of_column) +
                   c * (2 * of_column));
    columns_ = static_cast<const float*>(call.zeros) + tile * kTileN + c;
  }

  /// `turn`: chunks to the warp's next one.
  __device__ __forceinline__ void load_first(int turn) {
    step_ *= turn;
    load_columns(columns_, Scaled::kUnit);
    start_load();
  }
  /// Begin a chunk; `more`: another one follows.
  __device__ __forceinline__ void enter(bool more) {
#pragma unroll
    for (int j = 0; j < 4; ++j) now_[j] = Scaled::kept(next_[j]);
    if (!more) return;
    at_ = opaque(at_ + step_);
    start_load();
  }
  /// Two operands of 16 rows, columns 16j + c and 16j + c + 8, in step `step` of the chunk.
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int j, uint32_t (&to)[2][4]) const {
    const uint32_t scales = Scaled::of_rows(now_[j], step);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      uint32_t* both = to[u / 2] + u % 2 * 2;
      codes_.pair(words[u], step % 2, scales, both[0], both[1]);
    }
  }

 private:
  __device__ __forceinline__ void start_load() {
#pragma unroll
    for (int j = 0; j < 4; ++j) next_[j] = Scaled::start_load(at_ + j * apart_, group_, threadIdx.x % 4 / 2);
  }

  Scaled codes_;
  int group_;
  const unsigned char* at_;
  const float* columns_;
  int step_, apart_;  // bytes to the next chunk, and to the next 16 columns
  uint2 now_[4];
  typename Scaled::LaneScales next_[4];
};

/// Class of scales for each kind of groups.
template <class T, Code code, Groups groups>
using ScalesOf = std::conditional_t<
    groups == Groups::kScaled, GroupScales<T, code>,
    std::conditional_t<groups == Groups::kTiles, TileScales,
                       std::conditional_t<groups == Groups::kOffsets, OffsetScales<T, bits_of(code)>, Scales<T, bits_of(code)>>>>;

}  // namespace qload::cuda
