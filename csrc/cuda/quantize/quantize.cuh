// Quantization of inputs, one token per block. A thread keeps one or two groups of eight inputs in registers between the
// search of scales and the rounding; a longer token is read twice, the second time from the cache.
//
//   codes[m, k] = rounded(x[m, k] / step + zero), saturating    step, zero: of the token, of `size` neighbours, or of all
//   becoming    the codes, e4m3 or int8; code - zero in a float type; (code - zero) * step / power in a float type
//
//   in   x        fp16, bf16 or fp32 (M, K), rows `pitch` apart
//   out  codes    (rows, K); steps, zeros (M, groups) or one, powers (M,): fp32
//
//   needs    K a multiple of 8, rows of x at multiples of 8 elements; groups of 8, 16, ... 256 inputs that divide K
//   grid     one block per row, up to 1024 threads with eight neighbouring inputs at a time
//   If all tokens share a scale, a first launch writes the largest input of each token to `largest`.
//   Each launch may start before the previous kernel ends, and allows the next one to start at once.
// Equals qload.kernels.activations.quantize on the same device, bit for bit.
#pragma once

#include <cstdint>

#include "scales.cuh"

namespace qload::cuda {

constexpr int kMostThreads = 1024, kEight = 8;

template <class T>
__device__ __forceinline__ void load_eight(const T* from, float (&values)[kEight]) {
  alignas(16) T held[kEight];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof held / 16); ++i)
    reinterpret_cast<uint4*>(held)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
#pragma unroll
  for (int i = 0; i < kEight; ++i) values[i] = static_cast<float>(held[i]);
}

/// The bits of a positive number, 0 for others, and NaN's bits for NaN: ordered as numbers, with NaN last.
__device__ __forceinline__ uint32_t above_zero(float x) {
  return x > 0 ? __float_as_uint(x) : x != x ? 0x7FFFFFFFu : 0;
}

/// The largest of eight: of -x and of x separately if `both`, else of absolute values.
__device__ __forceinline__ void largest_of(const float (&x)[kEight], bool both, uint32_t& low, uint32_t& high) {
  if (both) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) high = max(high, above_zero(x[i])), low = max(low, above_zero(-x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) high = max(high, __float_as_uint(fabsf(x[i])));
  }
}

/// Maximum over all threads of a block.
__device__ __forceinline__ uint32_t of_block(uint32_t mine, uint32_t* shared) {
  mine = __reduce_max_sync(~0u, mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  return __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0);
}

/// A token's inputs of a thread: groups of eight, blockDim.x groups apart, the first `kept` of them in registers; with 0
/// all are loaded at each use. Beyond the end of the row they are zeros.
template <class T, int kept>
class Row {
 public:
  __device__ __forceinline__ Row(const T* x, int64_t K) : x_(x), K_(K) {
#pragma unroll
    for (int i = 0; i < kept; ++i) load(threadIdx.x * kEight + i * int64_t{blockDim.x} * kEight, held_[i]);
  }

/// Call `take(k, inputs, i)` for the thread's i-th group of eight; all lanes of a warp call together.
  template <class Take>
  __device__ __forceinline__ void each(const Take& take) const {
    const int64_t step = int64_t{blockDim.x} * kEight;
    if constexpr (kept > 0) {
#pragma unroll
      for (int i = 0; i < kept; ++i) take(threadIdx.x * kEight + i * step, held_[i], i);
    } else {
      const int64_t end = (K_ + 32 * kEight - 1) / (32 * kEight) * (32 * kEight);
      for (int64_t k = threadIdx.x * kEight; k < end; k += step) {
        float values[kEight];
        load(k, values);
        take(k, values, 0);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int64_t k, float (&values)[kEight]) const {
    if (k < K_) return load_eight(x_ + k, values);
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = 0;
  }

  const T* x_;
  int64_t K_;
  float held_[kept > 0 ? kept : 1][kEight];
};

template <class T, int kept>
__device__ __forceinline__ void largest_of_row(const Quantizing& work, const Row<T, kept>& row, uint32_t* shared,
                                               uint32_t& low, uint32_t& high) {
  const bool both = work.finding == Finding::kAsymmetric;
  low = high = 0;
  row.each([&](int64_t, const float(&values)[kEight], int) { largest_of(values, both, low, high); });
  high = of_block(high, shared);
  if (both) low = of_block(low, shared);
}

/// The largest input of each token, for one scale of all tokens.
template <class T>
__global__ void __launch_bounds__(kMostThreads) largest_of_tokens(const __grid_constant__ Quantizing work) {
  __shared__ uint32_t shared[32];
  let_dependents_start();
  wait_for_earlier_kernels();
  uint32_t low, high;
  largest_of_row(work, Row<T, 0>(static_cast<const T*>(work.x) + blockIdx.x * work.pitch, work.K), shared, low, high);
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
  const uint2 words = *reinterpret_cast<const uint2*>(bytes);
  uint8_t* to = static_cast<uint8_t*>(work.codes) + at;
  if (work.becoming == Becoming::kCodes) {
    *reinterpret_cast<uint2*>(to) = words;
  } else {  // inputs 8 t to 8 t + 7 of 32 are four neighbours in each half
    to -= at % 32 / 2;
    *reinterpret_cast<uint32_t*>(to) = words.x, *reinterpret_cast<uint32_t*>(to + 16) = words.y;
  }
}

__device__ __forceinline__ void store_eight(const Quantizing& work, const float (&values)[kEight], bool bytes, int64_t at) {
  if (bytes)
    store_codes(work, values, at);
  else if (work.made == Float::kFloat16)
    store_made(values, static_cast<__half*>(work.codes) + at);
  else if (work.made == Float::kBfloat16)
    store_made(values, static_cast<__nv_bfloat16*>(work.codes) + at);
  else
    store_made(values, static_cast<float*>(work.codes) + at);
}

/// The step of the group of eight neighbours; all lanes of a group call together.
__device__ __forceinline__ Step step_of_group(const Quantizing& work, const float (&x)[kEight]) {
  const bool both = work.finding == Finding::kAsymmetric;
  uint32_t low = 0, high = 0;
  largest_of(x, both, low, high);
  for (int apart = 1; apart < work.size / kEight; apart *= 2) {
    high = max(high, __shfl_xor_sync(~0u, high, apart));
    if (both) low = max(low, __shfl_xor_sync(~0u, low, apart));
  }
  return step_of(work, low, high);
}

/// The step of a token with one step for all its inputs.
template <class T, int kept>
__device__ __forceinline__ Step step_of_row(const Quantizing& work, const Row<T, kept>& row, uint32_t* shared) {
  uint32_t low = 0, high = 0;
  if (work.finding == Finding::kStored || work.size) return work.size ? Step{} : step_of(work, 0, 0);
  if (!work.all || work.M == 1) {
    largest_of_row(work, row, shared, low, high);
    return step_of(work, low, high);
  }
  for (int64_t m = threadIdx.x; m < work.M; m += blockDim.x) {
    high = max(high, work.largest[m]);
    low = max(low, work.largest[work.M + m]);
  }
  high = of_block(high, shared);
  return step_of(work, of_block(low, shared), high);
}

/// `kind`: of codes; `kept`: groups of eight inputs in a thread's registers.
template <class T, Kind kind, int kept>
__global__ void __launch_bounds__(kMostThreads) quantize_tokens(const __grid_constant__ Quantizing work) {
  __shared__ uint32_t shared[32];
  let_dependents_start();
  wait_for_earlier_kernels();
  const int64_t m = blockIdx.x;
  if (m >= work.M) {  // rows beyond the tokens
    const uint32_t filled = work.ones && m == work.M ? 0x01010101u : 0;
    for (int64_t k = threadIdx.x * kEight; k < work.K; k += blockDim.x * kEight)
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(work.codes) + m * work.K + k) = {filled, filled};
    return;
  }
  const Row<T, kept> row(static_cast<const T*>(work.x) + m * work.pitch, work.K);
  const Step all = step_of_row(work, row, shared);
  const bool one = work.all || work.finding == Finding::kStored;
  if (!work.size && threadIdx.x == 0) {
    if (work.each || !one || m == 0) work.steps[m] = all.step;
    if (work.zeros && (!one || m == 0)) work.zeros[m] = all.zero;
  }
  const bool meant = work.becoming == Becoming::kMeant;
  const bool bytes = work.becoming == Becoming::kCodes || work.becoming == Becoming::kPermuted;
  const int64_t width = work.becoming == Becoming::kPermuted ? (work.K + 31) / 32 * 32 : work.K;  // of a row of codes
  float inverse = 1;
  Step steps[kept > 0 ? kept : 1];  // of groups
  if (meant) {
    uint32_t high = __float_as_uint(fabsf(all.step));
    if (work.size)
      row.each([&](int64_t k, const float(&values)[kEight], int i) {
        steps[i] = step_of_group(work, values);
        if (k < work.K) high = max(high, __float_as_uint(fabsf(steps[i].step)));
      });
    const float power = power_above(__uint_as_float(of_block(high, shared)));
    inverse = __fdiv_rn(1.0f, power);
    if (threadIdx.x == 0) work.powers[m] = power;
  }
  row.each([&](int64_t k, const float(&values)[kEight], int i) {
    Step step = all;
    if (work.size) step = meant && kept > 0 ? steps[i] : step_of_group(work, values);
    if (k >= width) return;
    if (work.size && k < work.K && k % work.size == 0) {
      const int64_t group = m * (work.K / work.size) + k / work.size;
      if (work.steps) work.steps[group] = step.step;
      if (work.zeros) work.zeros[group] = step.zero;
    }
    float codes[kEight];
    code<kind>(work, step, values, work.becoming != Becoming::kPermuted, codes);
    if (kind == Kind::kWhole && !bytes)
#pragma unroll
      for (int i = 0; i < kEight; ++i) codes[i] = __fsub_rn(codes[i], step.zero);
    if (meant)
#pragma unroll
      for (int i = 0; i < kEight; ++i)  // the second factor is a power of two, so the product is exact
        codes[i] = __fmul_rn(__fmul_rn(codes[i], step.step), inverse);
    store_eight(work, codes, bytes, m * width + k);
  });
}

}  // namespace qload::cuda
