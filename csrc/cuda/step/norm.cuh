// The sum of two vectors of each token, and its RMS norm.
//
//   sum[m] = rounded(x[m] + added[m])
//   y[m]   = rounded(sum[m] / sqrt(mean(sum[m]**2) + eps) * weight)
//
//   in, out  see AddNorm in step.h; without `added` the sum is x and is not written
//   needs    size % 8 == 0, at most 32768; all aligned to 16 bytes
//   grid     (rows,); a thread for each eight, sixteen or thirty-two numbers, up to 1024 threads
//   A row stays in registers between its two uses. The limit is the latency of one read, one sum and one write.
//
// Equals torch's sum bit for bit, and its rms_norm within the rounding of fp32 sums (qload/models/norm.py).
#pragma once

#include "eight.cuh"
#include "step.h"

namespace qload::cuda {

constexpr int kMostEights = 4;  // of a thread

template <class T, int kEights>
__global__ void __launch_bounds__(1024) add_norm_kernel(const __grid_constant__ AddNorm call) {
  __shared__ float of_warps[32];
  const int count = call.size / 8, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * count;
  let_dependents_start();
  wait_for_earlier_kernels();

  Eight<T> x[kEights], weight[kEights];
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kEights; ++v) {
    const int at = v * blockDim.x + threadIdx.x;
    if (at >= count) break;
    x[v] = eight<T>(call.x, row + at);
    weight[v] = eight<T>(call.weight, at);
    if (call.added) {
      const Eight<T> added = eight<T>(call.added, row + at);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v].set(i, x[v][i] + added[i]);
      put(call.sum, row + at, x[v]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(x[v][i], x[v][i], squares);
  }
  squares = sum_of_lanes(squares, 32);
  if (lane == 0) of_warps[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = sum_of_lanes(lane < warps ? of_warps[lane] : 0, 32);
  const float factor = rsqrtf(squares / static_cast<float>(call.size) + call.eps);
#pragma unroll
  for (int v = 0; v < kEights; ++v) {
    const int at = v * blockDim.x + threadIdx.x;
    if (at >= count) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[v].set(i, x[v][i] * factor * weight[v][i]);
    put(call.y, row + at, x[v]);
  }
}

}  // namespace qload::cuda
