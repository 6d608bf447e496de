// A weight of 3 bits in ExLlama's order as fp16 or bf16 (K, N), for the vendor's product.
//
//   w[k, n] = scale[g, n] * (code[k, first + n] - zero[g, n]),   g = g_idx[k], rounded once from fp32
//
//   in   see rounded.h
//   out  w      (K, columns), rows in the stored order
//
//   grid     (columns / 4 / kRoundedThreads, K / 32); a thread has four neighbouring columns of the 32 rows of three words
//   A warp writes 256 bytes of a row at once. Scales and zero points are loaded at each change of the group, which is
//   the same for all threads of a block. Memory is the limit: 2.375 bytes per weight.
//
// Equals ExllamaWeight.dequantize() (qload/kernel_formats/exllama.py), without its q_perm, rounded.
#pragma once

#include "../device/number.cuh"
#include "../device/ptx.cuh"
#include "rounded.h"

namespace qload::cuda::exl {

constexpr int kRoundedThreads = 128;

/// Code `row` of 32 of a column's three words: see qload/layouts/exllama.py.
__device__ __forceinline__ uint32_t code_of(const uint32_t (&words)[3], int row) {
  if (row < 30) return words[row / 10] >> (row % 2 * 16 + row % 10 / 2 * 3) & 7;
  const int bit = row % 2 * 16 + 15;
  return (words[0] >> bit & 1) | (words[1] >> bit & 1) << 1 | (words[2] >> bit & 1) << 2;
}

template <class T>
__global__ void __launch_bounds__(kRoundedThreads) rounded_three_kernel(const __grid_constant__ RoundedThree call) {
  const int at = (blockIdx.x * kRoundedThreads + threadIdx.x) * 4, column = call.first + at, row = blockIdx.y * 32;
  if (at >= call.columns) return;
  uint32_t words[4][3];
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    const auto* from = static_cast<const uint32_t*>(call.weights) + (int64_t{blockIdx.y} * 3 + w) * call.N + column;
    const uint4 four = load_once(reinterpret_cast<const uint4*>(from));
    words[0][w] = four.x, words[1][w] = four.y, words[2][w] = four.z, words[3][w] = four.w;
  }
  float scales[4], zeros[4];
  const auto enter = [&](int group) {
    __align__(8) T own[4];
    const uint2 read =
        __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(call.scales) + int64_t{group} * call.N + column));
    memcpy(own, &read, sizeof own);
    const auto* fields = static_cast<const uint32_t*>(call.zeros) + (int64_t{group} * call.N + column) / 32 * 3;
    const int bit = column % 32 * 3, word = bit / 32;
    const uint32_t low = __ldg(fields + word), high = __ldg(fields + min(word + 1, 2));
    const uint32_t four = __funnelshift_r(low, high, bit % 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales[i] = wide(own[i]);
      zeros[i] = float_of(((four >> 3 * i & 7) + call.zero_add) & call.zero_mask);
    }
  };
  int now = __ldg(call.g_idx + row);
  enter(now);
  T* w = static_cast<T*>(call.w) + int64_t{row} * call.columns + at;
#pragma unroll
  for (int k = 0; k < 32; ++k) {
    const int group = __ldg(call.g_idx + row + k);
    if (group != now) enter(group), now = group;
    __align__(8) T four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = narrow<T>(scales[i] * (float_of(code_of(words[i], k)) - zeros[i]));
    uint2 made;
    memcpy(&made, four, sizeof made);
    *reinterpret_cast<uint2*>(w + int64_t{k} * call.columns) = made;
  }
}

}  // namespace qload::cuda::exl
