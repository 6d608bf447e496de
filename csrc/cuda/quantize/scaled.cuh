// Results from sums of codes, four at a time.
//
//   y[m, n] = rounded((sums[m, n] - zeros[m] * sums[M, n]) * row[m] * column[n] + bias[n])
//
//   in   sums     fp32 (M, N), or int32, whose difference is exact and rounded once
//        row, column, zeros   fp32; bias fp32, fp16 or bf16
//   out  y        fp32, fp16, bf16 (M, N), rows `pitch` apart
//
//   needs    N a multiple of 4, rows of y at multiples of four elements
//   grid     1024 results per block along x, tokens along y
#pragma once

#include <cstdint>

#include "../dequantize/meaning.cuh"
#include "quantize.h"

namespace qload::cuda {

constexpr int kScaledThreads = 256, kFour = 4;

template <class Y, bool whole>
__global__ void __launch_bounds__(kScaledThreads) scale_sums_kernel(const __grid_constant__ Scaling work) {
  const int64_t n = (int64_t{blockIdx.x} * kScaledThreads + threadIdx.x) * kFour;
  if (n >= work.N) return;
  float4 columns = {1, 1, 1, 1};
  if (work.column_each) columns = __ldg(reinterpret_cast<const float4*>(work.column + n));
  else if (work.column) columns.x = columns.y = columns.z = columns.w = *work.column;
  const float column[kFour] = {columns.x, columns.y, columns.z, columns.w};
  for (int64_t m = blockIdx.y; m < work.M; m += gridDim.y) {
    const uint4 four = __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(work.sums) + m * work.N + n));
    const uint32_t sums[kFour] = {four.x, four.y, four.z, four.w};
    const float row = work.row[work.row_each ? m : 0];
    int32_t off[kFour] = {};
    if (whole && work.zeros) {
      const auto zero = static_cast<int32_t>(work.zeros[work.zero_each ? m : 0]);
      const int4 last = __ldg(reinterpret_cast<const int4*>(static_cast<const int32_t*>(work.sums) + work.M * work.N + n));
      off[0] = zero * last.x, off[1] = zero * last.y, off[2] = zero * last.z, off[3] = zero * last.w;
    }
    alignas(16) Y made[kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      float value = whole ? static_cast<float>(static_cast<int32_t>(sums[i]) - off[i]) : __uint_as_float(sums[i]);
      value = __fmul_rn(value, row);
      if (work.column) value = __fmul_rn(value, column[i]);
      if (work.bias)
        value = __fadd_rn(value, read_float(reinterpret_cast<uintptr_t>(work.bias), static_cast<int>(work.bias_type), n + i));
      round_to(value, made[i]);
    }
    Y* to = static_cast<Y*>(work.y) + m * work.pitch + n;
    if constexpr (sizeof(Y) == 4)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(made);
    else
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(made);
  }
}

}  // namespace qload::cuda
