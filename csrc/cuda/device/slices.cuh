// Addition of partial sums over slices of K, each in fp32, in a fixed order.
#pragma once

#include "number.cuh"
#include "ptx.cuh"

namespace qload::cuda {

/// Load past the L1: after an early start the L1 may have an older value. Tokens past the last read its scale.
template <class Call>
__device__ __forceinline__ float token_scale(const Call& call, int m) {
  return __ldcg(call.token_scales + min(m, call.M - 1));
}

constexpr int kAddThreads = 128;

/// y from all slices: a thread adds four columns of a token, in the order of the slices. A block needs few registers, so
/// that it can wait on a multiprocessor beside a block of the kernel before.
template <class T, class Call>
__global__ void __launch_bounds__(kAddThreads) add_slices(const __grid_constant__ Call call) {
  let_dependents_start();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kAddThreads + threadIdx.x, apart = int64_t{call.M} * call.N;
  const int m = static_cast<int>(i / (call.N / 4)), n = static_cast<int>(i % (call.N / 4)) * 4;
  if (m >= call.M || n >= call.outputs) return;
  const float* from = static_cast<const float*>(call.parts) + i * 4;
  float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 4
  for (int slice = 1; slice < call.slices; ++slice) add(sum, *reinterpret_cast<const float4*>(from + slice * apart));
  if (call.token_scales) scale(sum, token_scale(call, m));
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  __align__(8) T rounded[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool biased = call.bias && n + j < call.outputs;
    rounded[j] = narrow<T>(values[j] + (biased ? wide(static_cast<const T*>(call.bias)[n + j]) : 0.0f));
  }
  T* to = static_cast<T*>(call.y) + int64_t{m} * call.outputs + n;
  if (call.outputs % 4 == 0)
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(rounded);
  else
    for (int j = 0; j < min(4, call.outputs - n); ++j) to[j] = rounded[j];
}

}  // namespace qload::cuda
