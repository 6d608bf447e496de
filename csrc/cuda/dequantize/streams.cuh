// Codes of any width along the columns of a matrix of words, to rows of floats.
//
//   out[n, k] = round((code[r, n] - zero[g, n]) * scale[g, n])      r = order[k], g the group of row r
//
//   in   words    (R, N): row r of codes starts at bit starts[r] of each column and has widths[r] bits; without these
//                 tables it starts at bit r * bits and has `bits` bits
//        scales   fp32, fp16, bf16 at any strides; or EXL2's: four bits (G, N / 8), squared, times units[g] / 256 in fp16
//        zeros    words of `bits` bits along N, (field + add) & mask; or none: 2**(widths[r] - 1)
//   out  out      fp32, fp16, bf16  (N, K); EXL2's values are rounded to fp16 first
//
//   needs    K a multiple of 8, `out` and `order` at multiples of 16 bytes
//   grid     a block has `columns` outputs and `rows` inputs: all inputs if there is an order
//   A thread expands eight rows of a column into shared memory; from there warps store rows of `out`.
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

constexpr int kStreamThreads = 512;

__device__ __forceinline__ float scale_of_group(const Streams& s, int g, int n) {
  if (!s.squares) return read_float(s.scales, s.scale_type, n * s.scale_n + g * s.scale_k);
  const int root = static_cast<int>(__ldg(s.squares + int64_t{g} * (s.N / 8) + n / 8) >> (4 * (n % 8)) & 15) + 1;
  const float unit = __half2float(__float2half_rn(__half2float(s.units[g]) * 0.00390625f));
  return __half2float(__float2half_rn(__fmul_rn(static_cast<float>(root * root), unit)));
}

__device__ __forceinline__ float zero_of_group(const Streams& s, int g, int n, int width) {
  if (!s.zeros) return static_cast<float>(1 << (width - 1));
  const int64_t bit = int64_t{n} * s.bits;
  const int at = static_cast<int>(bit & 31);
  const uint32_t* word = s.zeros + g * s.zeros_pitch + (bit >> 5);
  uint32_t field = word[0] >> at;
  if (at + s.bits > 32) field |= word[1] << (32 - at);
  return static_cast<float>((static_cast<int>(field & ((1u << s.bits) - 1)) + s.add) & s.mask);
}

/// A column of words, with a copy of the last word read.
struct Column {
  const uint32_t* words;
  int64_t pitch;
  int last, have;  // index of the last word of the column, and of the copy
  uint32_t word;

  __device__ __forceinline__ uint32_t at(int w) {
    if (w != have) word = __ldg(words + min(w, last) * pitch);
    have = w;
    return word;
  }

/// Code of `width` bits at a bit of the column.
  __device__ __forceinline__ float code(uint32_t bit, int width) {
    const int shift = bit & 31, w = static_cast<int>(bit >> 5);
    uint32_t found = at(w) >> shift;
    if (shift + width > 32) found |= at(w + 1) << (32 - shift);
    return static_cast<float>(found & ((1u << width) - 1));
  }
};

__device__ __forceinline__ int group_of_row(const Streams& s, int r) {
  return s.groups ? __ldg(s.groups + r) : static_cast<int>(static_cast<uint32_t>(r) / static_cast<uint32_t>(s.run));
}

/// Values of eight rows of column n from row r. Groups are consecutive, except with a table of groups without starts.
__device__ __forceinline__ void expand_eight(const Streams& s, int n, int r, float (&values)[kTogether]) {
  Column column{s.words + n, s.N, static_cast<int>(s.R - 1), -1, 0};
  int group = group_of_row(s, r), width = s.widths ? __ldg(s.widths + r) : s.bits;
  const bool one = (s.starts || !s.groups) && group == group_of_row(s, r + kTogether - 1);
  uint32_t bit = s.starts ? __ldg(s.starts + r) : static_cast<uint32_t>(r) * s.bits;
  Affine affine{scale_of_group(s, group, n), zero_of_group(s, group, n, width)};
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (!one && i > 0) {
      const int next = group_of_row(s, r + i);
      if (s.starts) bit = __ldg(s.starts + r + i), width = __ldg(s.widths + r + i);
      if (next != group) affine = {scale_of_group(s, next, n), zero_of_group(s, next, n, width)};
      group = next;
    }
    values[i] = __fmul_rn(__fsub_rn(column.code(bit, width), affine.zero), affine.scale);
    if (s.squares) values[i] = __half2float(__float2half_rn(values[i]));
    bit += width;
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
  const int shift = 31 - __clz(s.columns);  // `columns` is a power of two
  for (int i = threadIdx.x; i < rows / kTogether << shift; i += kStreamThreads) {
    const int n = i & (s.columns - 1), r = (i >> shift) * kTogether;
    if (n >= columns) continue;
    float values[kTogether];
    expand_eight(s, static_cast<int>(n0) + n, static_cast<int>(k0) + r, values);
    store_eight(values, tile + n * pitch + r);
  }
  __syncthreads();
  const int eights = rows / kTogether, warps = kStreamThreads / 32;
  for (int i = threadIdx.x / 32; i < columns * ((eights + 31) / 32); i += warps) {
    const int n = i % columns, k = (i / columns * 32 + lane) * kTogether;  // all rows of `out` use one piece of `order`
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
