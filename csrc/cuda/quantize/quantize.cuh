// Inputs as codes, one token a block: a token is read twice, the second time from the cache.
//
//   codes[m, k] = rounded(x[m, k] / step + zero), saturating         step, zero: of the token, of `size` neighbours, of all
//   becoming    the codes, e4m3 or int8; code - zero in a float type; (code - zero) * step / power in a float type
//
//   in   x        fp16, bf16 or fp32 (M, K), rows `pitch` apart
//   out  codes    (rows, K); steps, zeros (M, groups) or one, powers (M,): fp32
//
//   needs    K a multiple of 8, rows of x at multiples of 8 elements; groups of 8, 16, ... 256 inputs that divide K
//   grid     a block a row, 512 threads, of which each takes eight neighbours at a time
//   Where all tokens share a scale, a first launch leaves the largest input of each in `largest`.
// Equals qload.kernels.activations.quantize on the same device, bit for bit.
#pragma once

#include <cstdint>

#include "scales.cuh"

namespace qload::cuda {

constexpr int kQuantizeThreads = 512, kEight = 8;

template <class T>
__device__ __forceinline__ void load_eight(const T* from, float (&values)[kEight]) {
  alignas(16) T held[kEight];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof held / 16); ++i)
    reinterpret_cast<uint4*>(held)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
#pragma unroll
  for (int i = 0; i < kEight; ++i) values[i] = static_cast<float>(held[i]);
}

/// The bits of a number above 0, 0 of all below, NaN's of NaN: in the order of numbers, NaN last.
__device__ __forceinline__ uint32_t above_zero(float x) {
  return x > 0 ? __float_as_uint(x) : x != x ? 0x7FFFFFFFu : 0;
}

/// The largest of eight, `x` below 0 and from 0 on; without `both` of all absolute values.
__device__ __forceinline__ void largest_of(const float (&x)[kEight], bool both, uint32_t& low, uint32_t& high) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    high = max(high, above_zero(both ? x[i] : fabsf(x[i])));
    if (both) low = max(low, above_zero(-x[i]));
  }
}

/// The largest that any thread of a block has.
__device__ __forceinline__ uint32_t of_block(uint32_t mine, uint32_t* shared) {
  mine = __reduce_max_sync(~0u, mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  return __reduce_max_sync(~0u, threadIdx.x % 32 < kQuantizeThreads / 32 ? shared[threadIdx.x % 32] : 0);
}

template <class T>
__device__ __forceinline__ void largest_of_row(const Quantizing& work, const T* x, uint32_t* shared, uint32_t& low,
                                               uint32_t& high) {
  const bool both = work.finding == Finding::kAsymmetric;
  low = high = 0;
  for (int64_t k = threadIdx.x * kEight; k < work.K; k += kQuantizeThreads * kEight) {
    float values[kEight];
    load_eight(x + k, values);
    largest_of(values, both, low, high);
  }
  high = of_block(high, shared);
  if (both) low = of_block(low, shared);
}

/// The largest of each token, for one scale of all.
template <class T>
__global__ void __launch_bounds__(kQuantizeThreads) largest_of_tokens(const __grid_constant__ Quantizing work) {
  __shared__ uint32_t shared[32];
  uint32_t low, high;
  largest_of_row(work, static_cast<const T*>(work.x) + blockIdx.x * work.pitch, shared, low, high);
  if (threadIdx.x == 0) work.largest[blockIdx.x] = high, work.largest[work.M + blockIdx.x] = low;
}

template <class Made>
__device__ __forceinline__ void store_made(const float (&values)[kEight], Made* to) {
  alignas(16) Made held[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if constexpr (sizeof(Made) == 4)
      held[i] = values[i];
    else
      held[i] = narrow<Made>(values[i]);
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof held / 16); ++i)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(held)[i];
}

__device__ __forceinline__ void store_codes(const Quantizing& work, const float (&codes)[kEight], int64_t at) {
  alignas(8) uint8_t bytes[kEight];
  if (work.whole) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) bytes[i] = static_cast<uint8_t>(static_cast<int>(codes[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kEight; i += 2)
      *reinterpret_cast<__nv_fp8x2_storage_t*>(bytes + i) =
          __nv_cvt_float2_to_fp8x2({codes[i], codes[i + 1]}, __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(work.codes) + at) = *reinterpret_cast<const uint2*>(bytes);
}

__device__ __forceinline__ void store_eight(const Quantizing& work, const float (&values)[kEight], int64_t at) {
  if (work.becoming == Becoming::kCodes)
    store_codes(work, values, at);
  else if (work.made == Float::kFloat16)
    store_made(values, static_cast<__half*>(work.codes) + at);
  else if (work.made == Float::kBfloat16)
    store_made(values, static_cast<__nv_bfloat16*>(work.codes) + at);
  else
    store_made(values, static_cast<float*>(work.codes) + at);
}

/// The step of the group that eight neighbours are in: lanes of a group ask for it together.
__device__ __forceinline__ Step step_of_group(const Quantizing& work, const float (&x)[kEight], uint32_t& low,
                                              uint32_t& high) {
  low = high = 0;
  largest_of(x, true, low, high);
  for (int apart = 1; apart < work.size / kEight; apart *= 2) {
    high = max(high, __shfl_xor_sync(~0u, high, apart));
    low = max(low, __shfl_xor_sync(~0u, low, apart));
  }
  return step_of(work, low, work.finding == Finding::kAsymmetric ? high : max(low, high));
}

/// The largest absolute value that eight inputs of a group stand for: one of those that its largest inputs do.
template <class T>
__device__ __forceinline__ uint32_t largest_meant(const Quantizing& work, const T* x, int64_t k) {
  float given[kEight] = {};
  if (k < work.K) load_eight(x + k, given);
  uint32_t low, high;
  const Step step = step_of_group(work, given, low, high);
  const float most = __fmul_rn(__fsub_rn(code_of(work, step, __uint_as_float(high)), step.zero), step.step);
  const float least = __fmul_rn(__fsub_rn(code_of(work, step, -__uint_as_float(low)), step.zero), step.step);
  return k < work.K ? max(above_zero(fabsf(most)), above_zero(fabsf(least))) : 0;
}

/// Eight inputs of a row from k on as what they become, before a power divides it. All lanes of a warp come here.
template <class T>
__device__ __forceinline__ Step become(const Quantizing& work, const T* x, int64_t k, const Step& all,
                                       float (&values)[kEight]) {
  float given[kEight] = {};
  if (k < work.K) load_eight(x + k, given);
  uint32_t low, high;
  const Step step = work.size ? step_of_group(work, given, low, high) : all;
  if (work.becoming == Becoming::kCodes) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = nearly_code(work, step, given[i]);
    return step;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    values[i] = __fsub_rn(code_of(work, step, given[i]), step.zero);
    if (work.becoming == Becoming::kMeant) values[i] = __fmul_rn(values[i], step.step);
  }
  return step;
}

/// The step of all inputs of a token, where they share one.
template <class T>
__device__ __forceinline__ Step step_of_row(const Quantizing& work, const T* x, uint32_t* shared) {
  uint32_t low = 0, high = 0;
  if (work.finding == Finding::kStored || work.size) return work.size ? Step{} : step_of(work, 0, 0);
  if (!work.all || work.M == 1) {
    largest_of_row(work, x, shared, low, high);
    return step_of(work, low, high);
  }
  for (int64_t m = threadIdx.x; m < work.M; m += kQuantizeThreads) {
    high = max(high, work.largest[m]);
    low = max(low, work.largest[work.M + m]);
  }
  high = of_block(high, shared);
  return step_of(work, of_block(low, shared), high);
}

template <class T>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_tokens(const __grid_constant__ Quantizing work) {
  __shared__ uint32_t shared[32];
  const int64_t m = blockIdx.x;
  if (m >= work.M) {  // more rows than tokens
    const uint32_t filled = work.ones && m == work.M ? 0x01010101u : 0;
    for (int64_t k = threadIdx.x * kEight; k < work.K; k += kQuantizeThreads * kEight)
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(work.codes) + m * work.K + k) = {filled, filled};
    return;
  }
  const T* x = static_cast<const T*>(work.x) + m * work.pitch;
  const Step all = step_of_row(work, x, shared);
  const bool one = work.all || work.finding == Finding::kStored;
  if (!work.size && threadIdx.x == 0 && (!one || m == 0)) {
    work.steps[m] = all.step;
    if (work.zeros) work.zeros[m] = all.zero;
  }
  float inverse = 1;
  const int64_t end = (work.K + 32 * kEight - 1) / (32 * kEight) * (32 * kEight);  // warps go on together
  float values[kEight];
  if (work.becoming == Becoming::kMeant) {
    uint32_t high = 0;
    for (int64_t k = threadIdx.x * kEight; k < end; k += kQuantizeThreads * kEight)
      high = max(high, largest_meant(work, x, k));
    const float power = power_below(__uint_as_float(of_block(high, shared)));
    inverse = __fdiv_rn(1.0f, power);
    if (threadIdx.x == 0) work.powers[m] = power;
  }
  for (int64_t k = threadIdx.x * kEight; k < end; k += kQuantizeThreads * kEight) {
    const Step step = become(work, x, k, all, values);
    if (k >= work.K) continue;
    if (work.size && k % work.size == 0) {
      const int64_t group = m * (work.K / work.size) + k / work.size;
      work.steps[group] = step.step;
      if (work.zeros) work.zeros[group] = step.zero;
    }
    if (work.becoming == Becoming::kMeant)
#pragma unroll
      for (int i = 0; i < kEight; ++i) values[i] = __fmul_rn(values[i], inverse);  // a power of two, so it is exact
    store_eight(work, values, m * work.K + k);
  }
}

}  // namespace qload::cuda
