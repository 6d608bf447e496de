// Codes of any width that run down the columns of a matrix of words, to rows of floats.
//
//   out[n, k] = round((code[r, n] - zero[g, n]) * scale[g, n])      r = order[k], g the group of row r
//
//   in   words    (R, N): row r of codes starts at bit starts[r] of each column and has widths[r] bits; without these
//                 tables at bit r * bits, and has `bits`
//        scales   fp32, fp16, bf16 at any strides; or EXL2's: four bits (G, N / 8), squared, times units[g] / 256 in fp16
//        zeros    words of `bits` bits along N, (field + add) & mask; or none: half of 2**widths[r]
//   out  out      fp32, fp16, bf16  (N, K); EXL2's values are rounded to fp16 first
//
//   needs    K a multiple of 8, `out` and `order` at multiples of 16 bytes
//   grid     `columns` outputs and `rows` inputs a block: all inputs where there is an order
//   A thread takes four rows of a column and leaves them in shared memory, from where warps write rows of `out`.
// Equals Codes.dequantize (qload/spec/weight.py) rounded to the type of `out`, bit for bit.
#pragma once

#include <cstdint>

#include "rows.cuh"

namespace qload::cuda {

struct Streams {
  const uint32_t* words;
  int64_t R, N, K;
  int bits;
  const int32_t *starts, *widths, *groups;  // (K,) by row, or null: r * bits, bits, r / run
  int run;
  const int32_t* order;    // (K,) or null
  uintptr_t scales;
  int scale_type;
  int64_t scale_n, scale_k;
  const uint32_t* squares;  // EXL2's scales, or null
  const __half* units;
  const uint32_t* zeros;   // or null
  int64_t zeros_pitch;     // words from group to group
  int add, mask;
  int columns, rows;       // of a block
};

constexpr int kStreamThreads = 512, kDown = 4;

__device__ __forceinline__ float scale_of_group(const Streams& s, int64_t g, int64_t n) {
  if (!s.squares) return read_float(s.scales, s.scale_type, n * s.scale_n + g * s.scale_k);
  const int root = static_cast<int>(__ldg(s.squares + g * (s.N / 8) + n / 8) >> (4 * (n % 8)) & 15) + 1;
  const float unit = __half2float(__float2half_rn(__half2float(s.units[g]) * 0.00390625f));
  return __half2float(__float2half_rn(__fmul_rn(static_cast<float>(root * root), unit)));
}

__device__ __forceinline__ float zero_of_group(const Streams& s, int64_t g, int64_t n, int width) {
  if (!s.zeros) return static_cast<float>(1 << (width - 1));
  const int64_t bit = n * s.bits;
  const int at = static_cast<int>(bit & 31);
  const uint32_t* word = s.zeros + g * s.zeros_pitch + (bit >> 5);
  uint32_t field = word[0] >> at;
  if (at + s.bits > 32) field |= word[1] << (32 - at);
  return static_cast<float>((static_cast<int>(field & ((1u << s.bits) - 1)) + s.add) & s.mask);
}

/// What four rows of column n from r on mean.
__device__ __forceinline__ void four_down(const Streams& s, int64_t n, int64_t r, float (&values)[kDown]) {
  int64_t have = -1, group = -1;
  uint32_t word = 0;
  Affine one{};
  const auto load = [&](int64_t w) {
    if (w != have) word = __ldg(s.words + min(w, s.R - 1) * s.N + n);
    have = w;
  };
#pragma unroll
  for (int i = 0; i < kDown; ++i, ++r) {
    const int64_t bit = s.starts ? s.starts[r] : r * s.bits;
    const int width = s.widths ? s.widths[r] : s.bits, at = static_cast<int>(bit & 31);
    load(bit >> 5);
    uint32_t code = word >> at;
    if (at + width > 32) {
      load((bit >> 5) + 1);
      code |= word << (32 - at);
    }
    code &= (1u << width) - 1;
    const int64_t g = s.groups ? s.groups[r] : r / s.run;
    if (g != group) one = {scale_of_group(s, g, n), zero_of_group(s, g, n, width)}, group = g;
    values[i] = __fmul_rn(__fsub_rn(static_cast<float>(code), one.zero), one.scale);
    if (s.squares) values[i] = __half2float(__float2half_rn(values[i]));
  }
}

template <class Out>
__global__ void __launch_bounds__(kStreamThreads)
dequantize_streams(const __grid_constant__ Streams s, Out* __restrict__ out) {
  extern __shared__ uint4 memory[];
  Out* tile = reinterpret_cast<Out*>(memory);
  const int pitch = s.rows + kTogether, lane = threadIdx.x % 32;
  const int64_t n0 = int64_t{blockIdx.x} * s.columns, k0 = int64_t{blockIdx.y} * s.rows;
  const int rows = static_cast<int>(min(int64_t{s.rows}, s.K - k0));
  const int columns = static_cast<int>(min(int64_t{s.columns}, s.N - n0));
  for (int i = threadIdx.x; i < s.columns * (rows / kDown); i += kStreamThreads) {
    const int n = i % s.columns, r = i / s.columns * kDown;
    if (n >= columns) continue;
    float values[kDown];
    four_down(s, n0 + n, k0 + r, values);
#pragma unroll
    for (int j = 0; j < kDown; ++j) round_to(values[j], tile[n * pitch + r + j]);
  }
  __syncthreads();
  const int eights = rows / kTogether, warps = kStreamThreads / 32;
  for (int i = threadIdx.x / 32; i < columns * ((eights + 31) / 32); i += warps) {
    const int n = i % columns, k = (i / columns * 32 + lane) * kTogether;  // rows of `out` use one piece of `order`
    if (k >= rows) continue;
    alignas(16) Out made[kTogether];
    if (s.order) {
      const int4* order = reinterpret_cast<const int4*>(s.order + k);
      const int4 a = __ldg(order), b = __ldg(order + 1);
      const int at[kTogether] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < kTogether; ++j) made[j] = tile[n * pitch + at[j]];
    } else {
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof made / 16); ++j)
        reinterpret_cast<uint4*>(made)[j] = reinterpret_cast<const uint4*>(tile + n * pitch + k)[j];
    }
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof made / 16); ++j)
      reinterpret_cast<uint4*>(out + (n0 + n) * s.K + k0 + k)[j] = reinterpret_cast<const uint4*>(made)[j];
  }
}

}  // namespace qload::cuda
