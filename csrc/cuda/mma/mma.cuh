// x times a weight of 4 or 8 bits in strips, best from 17 tokens on, from Ampere on.
//
//   y[m, n] = sum over k of x[m, k] * round(scale[g, n] * (code[k, n] - zero[g, n]) - offset[g, n])  + bias[n],   g = k / group
//   numbers:  scale * sum over k of x[m, k] * code[k, n], one scale per column, or per tile of 128 rows and 64 columns
//
//   in   see mma.h
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32; or parts of it in fp32 for add_slices
//
//   needs    K in multiples of 128, N of 64; groups of 32, 64, 128, or one; 98 KB of shared memory
//   grid     (tokens, columns, slices of K of a block), 8 warps
//
//                `columns` tiles of 64 columns, a warp each
//               +--------+--------+--------+--------+
//     8 *       |   0    |   1    |   2    |   3    |   The next row_warps have other rows of the same tokens and columns;
//     token_    |        |        |        |        |   warps after those have the next tokens.
//     tiles     +--------+--------+--------+--------+
//     tokens    |   4    |   5    |   6    |   7    |
//               +--------+--------+--------+--------+
//
//   Weights are the 16-row operand of m16n8k16, tokens its 8 columns: y^T = w^T x^T. A stage of the ring has 64 rows of x
//   and of words, 32 for 8 bits, for each of the row_warps. A copy has 16 bytes, one load of a lane. x is stored in runs
//   of 32 rows, 64 bytes per token, where a lane reads its eight neighbouring rows without a bank conflict.
//   Words are copied before the previous kernel has ended: only x may depend on that kernel. A warp loads x of a round of
//   tokens while it multiplies the round before, and computes the next step's operands while it multiplies the last
//   round. The matrix unit is the limit from 64 tokens on, memory below.
//
// Equals x @ StripsWeight.dequantize().T (qload/kernel_formats/strips.py), the weight rounded to the type of x, up to the
// rounding of fp32 sums.
#pragma once

#include <type_traits>

#include "../decode/operands.cuh"
#include "../decode/division.h"
#include "../device/scaled_codes.cuh"
#include "../device/slices.cuh"
#include "../device/sums.cuh"
#include "../many/operands.cuh"
#include "mma.h"

namespace qload::cuda::mma_room {

constexpr int kWarps = 8, kMostStages = 5;
constexpr int kStepRows = 32, kStepTokenBytes = 64;  // rows of two products, and bytes of x per token
constexpr int kTileStageBytes = 2048;                // words of a tile in a stage, of any width
constexpr int kGroupBytes = 128;                     // scales of a tile's columns in a group; zeros or offsets follow
constexpr int kWideBytes = 256;                      // the same of scales in fp32

/// Tiles of 8 tokens in a round, which are multiplied, and later stored, together.
__host__ __device__ constexpr int tiles_of_round(int token_tiles) { return token_tiles == 6 ? 3 : 4; }

/// Offsets of integers: none, of 16 bits, or of fp32 as the scales.
enum class Offsets : int { kNone, kNarrow, kWide };

__host__ __device__ constexpr int steps_of_stage(int bits) { return bits == 4 ? 2 : 1; }

struct Work : Division {
  int chunks;                    // of 128 rows
  int token_warps;               // of a block
  int stages, stage_bytes;       // of the ring
  int begins;                    // bit i: scales begin with step i of a chunk
  int scale_bytes, group_bytes;  // of scales of a tile in a stage, and of each group of integers
  int group_shift;               // a group has 2**group_shift rows
};

/// Tile, rows and tokens of a warp in its block, and their offsets in a slot of the ring.
struct Place {
  int column, row_warp, token_warp, x_at, words_at, scales_at;

  __device__ __forceinline__ Place(const Work& work, int stage_token_bytes, int tokens) {
    const int warp = threadIdx.x / 32, tiles = work.columns * work.row_warps, x_bytes = tokens * stage_token_bytes;
    column = warp % work.columns, row_warp = warp / work.columns % work.row_warps, token_warp = warp / tiles;
    const int tile = row_warp * work.columns + column;
    x_at = row_warp * x_bytes;
    words_at = work.row_warps * x_bytes + tile * kTileStageBytes;
    scales_at = work.row_warps * x_bytes + tiles * kTileStageBytes + tile * work.scale_bytes;
  }
};

/// A warp's copies into the ring, stage by stage: its share of its tile's words and of x of its rows, and scales.
template <class T, Code code, Offsets offsets>
class Filling {
 public:
  /// `tile`: of the layer; `chunk`: the warp's first; `tokens`: of the block.
  __device__ __forceinline__ Filling(const Mma& call, const Work& work, const Place& place, uint32_t memory, int tile,
                                     int chunk, int tokens)
      : call_(call), work_(work), place_(place), memory_(memory + lane() * 16), tile_(tile), row_(chunk * kChunk),
        eights_(tokens / 8), tokens_left_(call.M - 1 - blockIdx.x * tokens) {
    words_ = opaque(static_cast<const unsigned char*>(call.weights) + (int64_t{tile} * call.K + row_) * (8 * kBits_) +
                      lane() * 16);
    x_ = opaque(static_cast<const T*>(call.x) + int64_t{blockIdx.x} * tokens * call.inputs + row_ + lane() % 4 * 8);
  }

  /// Copy words and scales of stage `stage` into a slot.
  __device__ __forceinline__ void weights(int stage, int slot) const {
    const unsigned char* from = words_ + int64_t{stage} * kTileStageBytes;
    const uint32_t to = memory_ + slot * work_.stage_bytes;
    for (int i = place_.token_warp; i < kTileStageBytes / 512; i += work_.token_warps)
      copy_async(to + place_.words_at + i * 512, from + i * 512, false);
    if (place_.token_warp == 0) scales(row_ + stage * (kSteps_ * kStepRows), to + place_.scales_at);
  }
  /// Copy x of the same rows, eight tokens at a time.
  __device__ __forceinline__ void inputs(int stage, int slot) const {
    const int row = stage * (kSteps_ * kStepRows), left = call_.inputs - row_ - lane() % 4 * 8 - row;
    const uint32_t to = memory_ + slot * work_.stage_bytes + place_.x_at;
    const T* x = x_ + row;
    for (int eight = place_.token_warp * work_.columns + place_.column; eight < eights_;
         eight += work_.columns * work_.token_warps) {
      const T* from = x + min(8 * eight + lane() / 4, tokens_left_) * call_.inputs;
#pragma unroll
      for (int s = 0; s < kSteps_; ++s)
        copy_async(to + (s * eights_ + eight) * (8 * kStepTokenBytes), from + s * kStepRows, s * kStepRows >= left);
    }
  }

 private:
  static constexpr int kBits_ = bits_of(code), kSteps_ = steps_of_stage(kBits_);

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  /// Copy the scales that begin in the stage with first row `row`.
  __device__ __forceinline__ void scales(int row, uint32_t to) const {
    const auto from = static_cast<const unsigned char*>(call_.scales);
    if constexpr (is_scaled(code)) {
      const int of_column = column_scale_bytes(code, call_.group);
      if (row % kChunk == 0 && lane() < 4 * of_column)
        copy_async(to, from + (int64_t{row / kChunk} * call_.N + tile_ * kTileN) * of_column + lane() * 16, false);
    } else if constexpr (is_number(code)) {
      if (row % kChunk == 0 && work_.begins && lane() == 0)
        copy_word_async(to, from + (int64_t{row / kChunk} * (call_.N / kTileN) + tile_) * 4);
    } else if constexpr (offsets == Offsets::kWide) {  // 16 lanes for scales, and 16 for offsets
      const auto own = lane() < 16 ? from : static_cast<const unsigned char*>(call_.zeros) - kWideBytes;
#pragma unroll
      for (int s = 0; s < kSteps_; ++s) {
        const int own_row = row + s * kStepRows;
        const int64_t at = int64_t{own_row >> work_.group_shift} * call_.N + tile_ * kTileN;
        if (work_.begins >> (own_row / kStepRows % kSteps) & 1)
          copy_async(to + s * work_.group_bytes, own + at * 4 + lane() * 16, false);
      }
    } else {  // 16 lanes for each group
      constexpr int width = zero_width(kBits_, offsets == Offsets::kNarrow);
      const int own = row + lane() / 16 * kStepRows, piece = lane() % 16;
      if (lane() / 16 >= kSteps_ || !(work_.begins >> (own / kStepRows % kSteps) & 1)) return;
      const int64_t at = int64_t{own >> work_.group_shift} * call_.N + tile_ * kTileN;
      to += lane() / 16 * (work_.group_bytes - 256);
      if (piece < 8)
        copy_async(to, from + at * 2 + piece * 16, false);
      else if (call_.zeros && piece < 8 + width / 2)
        copy_async(to, static_cast<const unsigned char*>(call_.zeros) + at * width / 8 + (piece - 8) * 16, false);
    }
  }

  const Mma& call_;
  const Work& work_;
  const Place& place_;
  const uint32_t memory_;
  const int tile_, row_, eights_, tokens_left_;
  const T* x_;
  const unsigned char* words_;
};

/// Multiply sums by the fp32 scales of a lane's columns c + 8i, with the first one at `at`, and by a unit.
template <int token_tiles>
__device__ __forceinline__ void scale_columns(const float* at, float unit, float (&sum)[4][token_tiles][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float scale = at ? unit * __ldg(at + 16 * j + 8 * b) : unit;
#pragma unroll
      for (int m = 0; m < token_tiles; ++m) sum[j][m][2 * b] *= scale, sum[j][m][2 * b + 1] *= scale;
    }
}

/// Two operands of 16 rows from words of integers, with the scales of two columns.
template <int bits, class Column>
__device__ __forceinline__ void scale_pair(const Column& column, const uint32_t (&words)[4], int step, uint32_t (&to)[2][4]) {
#pragma unroll
  for (int u = 0; u < 4; ++u)
#pragma unroll
    for (int b = 0; b < 2; ++b)
      to[u / 2][u % 2 * 2 + b] = column.of(bits == 4 ? words[u] >> (8 * (step % 2)) : words[u], b);
}

/// Operands of integers with scales and zeros. In all of these classes `at` is the address of scales that begin in a step.
template <class T, int bits>
class Integers {
 public:
  __device__ __forceinline__ Integers(const Mma& call, const Work& work, int tile)
      : has_zeros_(call.zeros), group_bytes_(work.group_bytes) {
    if (work.begins) return;
    const int c = threadIdx.x % 32 / 4;
    const uint4 all = scales_per_column(static_cast<const T*>(call.scales) + tile * kTileN, c);
    const uint32_t scales[4] = {all.x, all.y, all.z, all.w};
    const auto at = static_cast<const uint32_t*>(call.zeros) + tile * (kTileN * bits / 32) + c * (bits / 4);
    uint32_t zeros[bits / 4] = {};
    if (has_zeros_)
#pragma unroll
      for (int i = 0; i < bits / 4; ++i) zeros[i] = __ldg(at + i);
    take(scales, zeros);
  }

  __device__ __forceinline__ void enter(int step, uint32_t at) {
    const int c = threadIdx.x % 32 / 4;
    at += step * group_bytes_;
    uint32_t scales[4], zeros[bits / 4] = {};
    load_shared(at + c * 16, scales);
    if (has_zeros_)
#pragma unroll
      for (int i = 0; i < bits / 4; ++i) zeros[i] = load_shared(at + kGroupBytes + c * bits + i * 4);
    take(scales, zeros);
  }
  template <int token_tiles>
  __device__ __forceinline__ void begin(uint32_t, float (&)[4][token_tiles][4]) {}
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int j, uint32_t (&to)[2][4]) const {
    scale_pair<bits>(columns_[j], words, step, to);
  }
  template <int token_tiles>
  __device__ __forceinline__ void leave(const Mma&, int, float (&)[4][token_tiles][4]) const {}

 private:
  __device__ __forceinline__ void take(const uint32_t (&scales)[4], const uint32_t (&zeros)[bits / 4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (has_zeros_)
        columns_[j].template enter<true>(scales[j], zeros[j / 2 % (bits / 4)], j);
      else
        columns_[j].template enter<false>(scales[j], 0, j);
  }

  const bool has_zeros_;
  const int group_bytes_;
  many_room::Columns<T, bits> columns_[4];
};

/// Operands of integers with offsets.
template <class T, int bits>
class OffsetIntegers {
 public:
  __device__ __forceinline__ OffsetIntegers(const Mma& call, const Work& work, int tile)
      : zero_(call.offset_zero), group_bytes_(work.group_bytes) {
    if (work.begins) return;
    const int c = threadIdx.x % 32 / 4;
    const uint4 scales = scales_per_column(static_cast<const T*>(call.scales) + tile * kTileN, c);
    const uint4 offsets = __ldg(static_cast<const uint4*>(call.zeros) + tile * (kTileN / 8) + c);
    take({scales.x, scales.y, scales.z, scales.w}, {offsets.x, offsets.y, offsets.z, offsets.w});
  }

  __device__ __forceinline__ void enter(int step, uint32_t at) {
    at += step * group_bytes_ + threadIdx.x % 32 / 4 * 16;
    uint32_t scales[4], offsets[4];
    load_shared(at, scales), load_shared(at + kGroupBytes, offsets);
    take(scales, offsets);
  }
  template <int token_tiles>
  __device__ __forceinline__ void begin(uint32_t, float (&)[4][token_tiles][4]) {}
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int j, uint32_t (&to)[2][4]) const {
    scale_pair<bits>(columns_[j], words, step, to);
  }
  template <int token_tiles>
  __device__ __forceinline__ void leave(const Mma&, int, float (&)[4][token_tiles][4]) const {}

 private:
  __device__ __forceinline__ void take(const uint32_t (&scales)[4], const uint32_t (&offsets)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) columns_[j].enter(scales[j], offsets[j], zero_);
  }

  const int zero_, group_bytes_;
  many_room::OffsetColumns<T, bits> columns_[4];
};

/// Operands of integers with fp32 scales and offsets: the weight is computed in fp32 and rounded once.
template <class T, int bits>
class WideIntegers {
 public:
  __device__ __forceinline__ WideIntegers(const Mma& call, const Work& work, int) : group_bytes_(work.group_bytes) {
    codes_.lay(call.offset_zero);
  }

  __device__ __forceinline__ void enter(int step, uint32_t at) {
    at += step * group_bytes_ + threadIdx.x % 32 / 4 * 32;
    load(at, scales_), load(at + kWideBytes, offsets_);
  }
  template <int token_tiles>
  __device__ __forceinline__ void begin(uint32_t, float (&)[4][token_tiles][4]) {}
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int j, uint32_t (&to)[2][4]) const {
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float2 codes = codes_.floats_of(bits == 4 ? words[u] >> (8 * (step % 2)) : words[u], b);
        const float scale = scales_[2 * j + b], offset = offsets_[2 * j + b];
        to[u / 2][u % 2 * 2 + b] = narrow<T>(fmaf(scale, codes.x, -offset), fmaf(scale, codes.y, -offset));
      }
  }
  template <int token_tiles>
  __device__ __forceinline__ void leave(const Mma&, int, float (&)[4][token_tiles][4]) const {}

 private:
  static __device__ __forceinline__ void load(uint32_t at, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t four[4];
      load_shared(at + i * 16, four);
#pragma unroll
      for (int k = 0; k < 4; ++k) to[4 * i + k] = __uint_as_float(four[k]);
    }
  }

  const int group_bytes_;
  many_room::Differences<T, bits> codes_;
  float scales_[8], offsets_[8];
};

/// Operands of 8-bit numbers, unscaled. Sums are in units of the latest scale of a tile.
template <class T, Code code>
class Bytes {
 public:
  __device__ __forceinline__ Bytes(const Mma&, const Work& work, int) : of_tiles_(work.begins) {}

  __device__ __forceinline__ void enter(int, uint32_t) {}
  /// Rescale the sums to the scale of the next tile of rows.
  template <int token_tiles>
  __device__ __forceinline__ void begin(uint32_t at, float (&sum)[4][token_tiles][4]) {
    const float last = scale_;
    scale_ = __uint_as_float(load_shared(at));
    scale_columns(nullptr, __fdividef(last, scale_), sum);
  }
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int, uint32_t (&to)[2][4]) const {
    Codes<T, code>::pair(words, step, 0, to);
  }
  template <int token_tiles>
  __device__ __forceinline__ void leave(const Mma& call, int column, float (&sum)[4][token_tiles][4]) const {
    scale_columns(of_tiles_ ? nullptr : static_cast<const float*>(call.scales) + column, scale_, sum);
  }

 private:
  const bool of_tiles_;
  float scale_ = 1;
};

/// Operands of numbers times the scales of their groups.
template <class T, Code code>
class ScaledNumbers {
 public:
  using Scaled = ScaledCodes<T, code>;

  __device__ __forceinline__ ScaledNumbers(const Mma& call, const Work&, int) : codes_(call.code), group_(call.group) {}

  __device__ __forceinline__ void enter(int, uint32_t at) {
    const int of_column = column_scale_bytes(code, group_), lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      scales_[j] = Scaled::kept(Scaled::load(at + (8 * j + lane / 4) * (2 * of_column), group_, lane % 4 / 2));
  }
  template <int token_tiles>
  __device__ __forceinline__ void begin(uint32_t, float (&)[4][token_tiles][4]) {}
  __device__ __forceinline__ void pair(const uint32_t (&words)[4], int step, int j, uint32_t (&to)[2][4]) const {
    const uint32_t scales = Scaled::of_rows(scales_[j], step);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      uint32_t* both = to[u / 2] + u % 2 * 2;
      codes_.pair(words[u], step % 2, scales, both[0], both[1]);
    }
  }
  template <int token_tiles>
  __device__ __forceinline__ void leave(const Mma& call, int column, float (&sum)[4][token_tiles][4]) const {
    scale_columns(static_cast<const float*>(call.zeros) + column, Scaled::kUnit, sum);
  }

 private:
  const Scaled codes_;
  const int group_;
  uint2 scales_[4];
};

template <class T, int bits, Offsets offsets>
using IntegersOf = std::conditional_t<offsets == Offsets::kNone, Integers<T, bits>,
                                      std::conditional_t<offsets == Offsets::kWide, WideIntegers<T, bits>, OffsetIntegers<T, bits>>>;

template <class T, Code code, Offsets offsets>
using OperandsOf = std::conditional_t<
    is_scaled(code), ScaledNumbers<T, code>,
    std::conditional_t<is_number(code), Bytes<T, code>, IntegersOf<T, bits_of(code), offsets>>>;

/// Bytes in shared memory of a tile's sums of a round.
__host__ __device__ constexpr int laid_bytes(int token_tiles) { return 8 * tiles_of_round(token_tiles) * kSumPitch * 4; }

/// Store y of the block, or a part of it, one round of each warp's tokens at a time.
template <class T, int token_tiles>
__device__ __forceinline__ void store(const Mma& call, const Work& work, unsigned char* memory,
                                      int first_token, const float (&sum)[4][token_tiles][4]) {
  constexpr int together = tiles_of_round(token_tiles), bytes = laid_bytes(token_tiles);
  const int first_column = blockIdx.y * work.columns * kTileN, tiles = work.columns * work.row_warps, lane = threadIdx.x % 32;
  float* own = reinterpret_cast<float*>(memory + threadIdx.x / 32 * bytes) + lane % 4 * 2 * kSumPitch + lane / 4;
  float* part = static_cast<float*>(call.parts) + int64_t{blockIdx.z} * call.M * call.N;
#pragma unroll
  for (int first = 0; first < token_tiles; first += together) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int m = 0; m < together; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) own[(8 * m + i % 2) * kSumPitch + 16 * j + 8 * (i / 2)] = sum[j][first + m][i];
    for (int token_warp = 0; token_warp < work.token_warps; ++token_warp)
      add_up(work, 8 * together, memory + token_warp * tiles * bytes, bytes, [&](int token, int column, float4 total) {
        const int m = first_token + 8 * (token_warp * token_tiles + first) + token, n = first_column + column;
        if (m >= call.M || n >= call.N) return;
        if (gridDim.z > 1) {
          *reinterpret_cast<float4*>(part + int64_t{m} * call.N + n) = total;
          return;
        }
        if (call.token_scales) scale(total, token_scale(call, m));
        put<T, false>(call.bias, call.y, call.outputs, m, n, total, 1);
      });
  }
}

template <class T, Code code, int token_tiles, Offsets offsets>
__global__ void __launch_bounds__(32 * kWarps, 1)
mma_kernel(const __grid_constant__ Mma call, const __grid_constant__ Work work) {
  constexpr int steps = steps_of_stage(bits_of(code)), stages_of_chunk = kSteps / steps;
  constexpr int together = tiles_of_round(token_tiles), rounds = token_tiles / together, units = steps * rounds;
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t ring = shared_address(memory);

  const int lane = threadIdx.x % 32, tokens = 8 * token_tiles * work.token_warps;
  const Place place(work, steps * kStepTokenBytes, tokens);
  const int tile = min(blockIdx.y * work.columns + place.column, call.N / kTileN - 1);
  // Chunks of the slice, and the warp's consecutive ones among them; other warps may have one more.
  const int first = static_cast<int>(int64_t{work.chunks} * blockIdx.z / gridDim.z);
  const int count = static_cast<int>(int64_t{work.chunks} * (blockIdx.z + 1) / gridDim.z) - first;
  const int before = count * place.row_warp / work.row_warps;
  const int own = (count * (place.row_warp + 1) / work.row_warps - before) * stages_of_chunk;
  const int all = (count + work.row_warps - 1) / work.row_warps * stages_of_chunk;

  let_dependents_start();
  const Filling<T, code, offsets> filling(call, work, place, ring, tile, first + before, tokens);
  OperandsOf<T, code, offsets> operands(call, work, tile);
  for (int stage = 0; stage < work.stages; ++stage)
    if (stage < own) filling.weights(stage, stage);
  wait_for_earlier_kernels();
  for (int stage = 0; stage < work.stages; ++stage) {
    if (stage < own) filling.inputs(stage, stage);
    group_copies();
  }

  float sum[4][token_tiles][4] = {};
  uint32_t in[2][together][4], operand[4][2][4];
  const uint32_t x_of_slot = ring + place.x_at + place.token_warp * (8 * token_tiles * kStepTokenBytes) + lane * 16;
  const uint32_t words_of_slot = ring + place.words_at + lane * 16;
  const uint32_t scales_of_slot = ring + place.scales_at;
  const auto load_inputs = [&](int unit, int at) {
#pragma unroll
    for (int m = 0; m < together; ++m)
      load_shared(x_of_slot + at + (unit / rounds * tokens + (unit % rounds * together + m) * 8) * kStepTokenBytes,
                  in[unit % 2][m]);
  };
  const auto begins = [&](int stage, int s) { return work.begins >> (stage % stages_of_chunk * steps + s) & 1; };
  const auto make_operand = [&](int stage, int s, int j, int at) {
    uint32_t words[4];
    load_shared(words_of_slot + at + j * 512, words);
    operands.pair(words, stage % stages_of_chunk * steps + s, j, operand[j]);
  };

  wait_for_copy_groups(work.stages - 1);
  __syncthreads();
  if (begins(0, 0)) operands.enter(0, scales_of_slot);
#pragma unroll
  for (int j = 0; j < 4; ++j) make_operand(0, 0, j, 0);
  load_inputs(0, 0);
  int slot = 0;
  for (int stage = 0; stage < own; ++stage) {
    const int next_slot = slot + 1 == work.stages ? 0 : slot + 1;
    const int here = slot * work.stage_bytes, there = next_slot * work.stage_bytes;
#pragma unroll
    for (int unit = 0; unit < units; ++unit) {
      const int s = unit / rounds, round = unit % rounds, next_s = (s + 1) % steps;
      const bool leaves = unit == units - 1, makes = round == rounds - 1, late = leaves && units % 2;
      const int next_stage = makes && next_s == 0 ? stage + 1 : stage, from = leaves ? there : here;
      if (round == 0 && begins(stage, s)) operands.begin(scales_of_slot + here, sum);
      if (leaves) {  // all data of the slot are in registers
        wait_for_copy_groups(work.stages - 2);
        __syncthreads();
        if (stage + work.stages < own) filling.weights(stage + work.stages, slot), filling.inputs(stage + work.stages, slot);
        group_copies();
      }
      if (!late) load_inputs((unit + 1) % units, from);
      if (makes && begins(next_stage, next_s)) operands.enter(next_s, scales_of_slot + from);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int m = 0; m < together; ++m)
            multiply(sum[j][round * together + m], operand[j][h], in[unit % 2][m][2 * h], in[unit % 2][m][2 * h + 1], T{});
        if (makes) make_operand(next_stage, next_s, j, from);
      }
      if (late) load_inputs(0, from);
    }
    slot = next_slot;
  }
  for (int stage = own; stage < all; ++stage) __syncthreads();  // matches the barriers of warps with more stages
  wait_for_copies();
  operands.leave(call, tile * kTileN + lane / 4, sum);
  store<T>(call, work, memory, blockIdx.x * tokens, sum);
}

}  // namespace qload::cuda::mma_room

namespace qload::cuda {

using MmaKernel = void (*)(const Mma, const mma_room::Work);

/// Kernel for the tokens of a warp, or null. `T`: the type of x.
template <class T>
MmaKernel mma_of(const Mma& call);

}  // namespace qload::cuda
