// Eight 16-bit numbers as the unit of loads and stores.
#pragma once

#include "../device/number.cuh"

namespace qload::cuda {

template <class T>
struct alignas(16) Eight {
  T values[8];

  __device__ __forceinline__ float operator[](int i) const { return wide(values[i]); }
  __device__ __forceinline__ void set(int i, float value) { values[i] = narrow<T>(value); }
};

/// The eight numbers at index `at` from `start`.
template <class T>
__device__ __forceinline__ Eight<T> eight(const void* start, int64_t at) {
  return as<Eight<T>>(static_cast<const uint4*>(start)[at]);
}

template <class T>
__device__ __forceinline__ void put(void* start, int64_t at, const Eight<T>& values) {
  static_cast<uint4*>(start)[at] = as<uint4>(values);
}

/// Sum over each run of `lanes` lanes, a power of two.
__device__ __forceinline__ float sum_of_lanes(float value, int lanes) {
  for (int step = lanes / 2; step; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

}  // namespace qload::cuda
