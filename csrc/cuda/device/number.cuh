// Half and bfloat16 numbers from codes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "ptx.cuh"

namespace qload::cuda {

template <class T>
struct Number;

// A code in the last bits of a half has the value code * 2**-24, exact in a product. In a bfloat16 this value is too
// small, but 128 + code has the code in its last bits.
template <>
struct Number<__half> {
  using Two = __half2;
  static constexpr uint32_t kMagic = 0, kOnes = 0x00010001, kExact = 0x64006400;
  static constexpr float kUnit = 16777216, kOffset = 0;
};

template <>
struct Number<__nv_bfloat16> {
  using Two = __nv_bfloat162;
  static constexpr uint32_t kMagic = 0x43004300, kOnes = 0x3F803F80, kExact = 0x43004300;
  static constexpr float kUnit = 1, kOffset = 128;
};

template <class To, class From>
__device__ __forceinline__ To as(From value) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &value, sizeof to);
  return to;
}

/// Force the compiler to keep a constant in a register.
__device__ __forceinline__ uint32_t in_register(uint32_t constant) {
  asm volatile("mov.u32 %0, %0;" : "+r"(constant));
  return constant;
}

/// A small integer as a float.
__device__ __forceinline__ float float_of(uint32_t small) {
  return __uint_as_float(0x4B000000u | small) - 8388608.0f;
}

template <class T>
__device__ __forceinline__ float wide(T value) {
  if constexpr (Number<T>::kMagic == 0)
    return __half2float(value);
  else
    return __bfloat162float(value);
}

__device__ __forceinline__ float wide(float value) { return value; }

template <class T>
__device__ __forceinline__ T narrow(float value) {
  if constexpr (Number<T>::kMagic == 0)
    return __float2half_rn(value);
  else
    return __float2bfloat16_rn(value);
}

/// Round two numbers into one register, the first in its lower half.
template <class T>
__device__ __forceinline__ uint32_t narrow(float first, float second) {
  if constexpr (Number<T>::kMagic == 0)
    return as<uint32_t>(__floats2half2_rn(first, second));
  else
    return as<uint32_t>(__floats2bfloat162_rn(first, second));
}

/// Bytes `low` and `high` of a word, minus 128, as two bfloat16. A difference has at most eight significant bits; it is
/// computed in fp32, and the upper half of the float has all of them.
__device__ __forceinline__ uint32_t bytes_less_128(uint32_t word, int low, int high) {
  const float first = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7650 | low)) - 8388736.0f;
  const float second = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7650 | high)) - 8388736.0f;
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

}  // namespace qload::cuda
