// Few tokens times rows of float32. Memory is the limit: each weight is read once.
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
//   block    4 x 2 warps: four along the outputs, with four outputs each, and two along K
//   lane     four neighbouring inputs of each token and each output, 128 inputs per warp. Partial sums of all outputs
//            and tokens are in registers and are added over lanes by halves: a lane sends one half of its sums and
//            receives the other, so that the number of shuffles equals the number of sums and not five times as many
//   order    for a given M the order of additions is fixed
//
// Rows and tokens beyond the last are read as the last one and not stored.
#pragma once

#include "floats.h"

namespace qload::cuda {

constexpr int kLanes = 32, kQuad = 4, kOutputs = 4, kAcross = 4, kAlong = 2;  // outputs of a warp; warps along N and K
constexpr int kFloatThreads = kLanes * kAcross * kAlong, kBlockOutputs = kOutputs * kAcross;
constexpr int kStep = kLanes * kQuad * kAlong;

/// Add `count` sums over the lanes of a warp; a lane gets max(1, count / 32) of them. Return the index of its first.
template <int count>
__device__ __forceinline__ int add_lanes(float (&sums)[count], int lane) {
  int first = 0, left = count;
#pragma unroll
  for (int other = kLanes / 2; other; other /= 2) {
    if (left > 1) {
      left /= 2;
      const bool upper = lane & other;
#pragma unroll
      for (int i = 0; i < count / 2; ++i) {
        if (i >= left) break;
        const float given = upper ? sums[i] : sums[i + left], kept = upper ? sums[i + left] : sums[i];
        sums[i] = kept + __shfl_xor_sync(~0u, given, other);
      }
      first += upper ? left : 0;
    } else {
      sums[0] += __shfl_xor_sync(~0u, sums[0], other);
    }
  }
  return first;
}

template <int tokens>
__global__ void __launch_bounds__(kFloatThreads, tokens > 8 ? 1 : 2) few_floats(const __grid_constant__ FloatRows work) {
  constexpr int kSums = kOutputs * tokens, kKept = kSums > kLanes ? kSums / kLanes : 1;
  constexpr int kCopies = kSums < kLanes ? kLanes / kSums : 1;  // lanes that end with the same sum
  __shared__ float parts[kAlong][kAcross][kSums];
  const int lane = threadIdx.x % kLanes, across = threadIdx.x / kLanes % kAcross, along = threadIdx.x / kLanes / kAcross;
  const int64_t block = int64_t{blockIdx.x} * kBlockOutputs, last = work.N - 1;

  const float* w[kOutputs];
  int x[tokens];
#pragma unroll
  for (int r = 0; r < kOutputs; ++r) w[r] = work.w + min(block + across * kOutputs + r, last) * work.K;
#pragma unroll
  for (int t = 0; t < tokens; ++t) x[t] = static_cast<int>(min(int64_t{t}, work.M - 1) * work.K);

  float sums[kSums] = {};
#pragma unroll 2
  for (int k = (along * kLanes + lane) * kQuad; k < work.K; k += kStep) {
    float4 weights[kOutputs];
#pragma unroll
    for (int r = 0; r < kOutputs; ++r) weights[r] = __ldcs(reinterpret_cast<const float4*>(w[r] + k));
#pragma unroll
    for (int t = 0; t < tokens; ++t) {
      const float4 inputs = __ldg(reinterpret_cast<const float4*>(work.x + x[t] + k));
#pragma unroll
      for (int r = 0; r < kOutputs; ++r) {
        float& sum = sums[t * kOutputs + r];
        sum = fmaf(weights[r].x, inputs.x, sum);
        sum = fmaf(weights[r].y, inputs.y, sum);
        sum = fmaf(weights[r].z, inputs.z, sum);
        sum = fmaf(weights[r].w, inputs.w, sum);
      }
    }
  }
  const int first = add_lanes(sums, lane);
  if (lane % kCopies == 0)
#pragma unroll
    for (int i = 0; i < kKept; ++i) parts[along][across][first + i] = sums[i];
  __syncthreads();

  for (int i = threadIdx.x; i < kBlockOutputs * tokens; i += kFloatThreads) {
    const int t = i / kBlockOutputs, r = i % kBlockOutputs;
    const int64_t n = block + r;
    if (t >= work.M || n > last) continue;
    const int at = t * kOutputs + r % kOutputs;
    const float sum = parts[0][r / kOutputs][at] + parts[1][r / kOutputs][at];
    work.y[t * work.pitch + n] = work.bias ? sum + work.bias[n] : sum;
  }
}

}  // namespace qload::cuda
