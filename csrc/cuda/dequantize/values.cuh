// Values of codes of small floats, exact in float32.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "meaning.h"

namespace qload::cuda {

/// e4m3fn: a sign, four bits of exponent, three of mantissa; 0x7F and 0xFF are NaN.
__device__ __forceinline__ float of_e4m3(uint32_t code) {
  const uint32_t size = code & 0x7F;
  const float value = size == 0x7F ? __uint_as_float(0x7FC00000) : __uint_as_float(size << 20) * 0x1p120f;
  return __uint_as_float(__float_as_uint(value) | (code & 0x80) << 24);
}

/// e5m2: the upper byte of a half.
__device__ __forceinline__ float of_e5m2(uint32_t code) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(code << 8)));
}

/// e2m1: a sign, two bits of exponent, one of mantissa; the same bits of a half are 2**14 times smaller.
__device__ __forceinline__ float of_e2m1(uint32_t code) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>((code & 8) << 12 | (code & 7) << 9))) * 16384.0f;
}

/// e8m0: 2**(exponent - 127), and 255 is NaN.
__device__ __forceinline__ float of_e8m0(uint32_t exponent) {
  if (exponent == 255) return __uint_as_float(0x7FC00000);
  return __uint_as_float(exponent == 0 ? 0x400000 : exponent << 23);
}

/// Value of a code; `lookup` has priority over `values`.
__device__ __forceinline__ float value_of(const Meaning& meaning, uint32_t code) {
  if (meaning.lookup) return reinterpret_cast<const float*>(meaning.lookup)[code];
  switch (static_cast<Values>(meaning.values)) {
    case Values::kE4m3:
      return of_e4m3(code);
    case Values::kE5m2:
      return of_e5m2(code);
    case Values::kE2m1:
      return of_e2m1(code);
    case Values::kSigned4:
      return static_cast<float>(static_cast<int>(code ^ 8) - 8);
    default:
      return static_cast<float>(code);
  }
}

}  // namespace qload::cuda
