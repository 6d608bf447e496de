// Codes of 8 bits in strips as operands with exactly their values. Scales multiply the sums.
#pragma once

#include "code.h"
#include "number.cuh"

namespace qload::cuda {

/// Two operands of a word: bytes b and b + 2 are two rows of column c + 8b.
template <class T, Code code>
struct Exact {
  static constexpr bool kHalf = Number<T>::kMagic == 0;

  static __device__ __forceinline__ uint32_t of(uint32_t word, int b) {
    if constexpr (converts_e4m3(code)) {
      const uint32_t halves = halves_of_e4m3(__byte_perm(word, 0, 0x3120) >> 16 * b);
      return kHalf ? halves : bfloat16s_of(halves);
    } else if constexpr (code == Code::kE5m2) {  // the upper byte of a half
      const uint32_t halves = __byte_perm(word, 0, b ? 0x3414 : 0x2404);
      return kHalf ? halves : bfloat16s_of(halves);
    } else if constexpr (kHalf) {  // 1024 + byte, less 1024 + 128
      const uint32_t beside = __byte_perm(word, 0x64646464, b ? 0x4341 : 0x4240);
      return as<uint32_t>(__hsub2(as<__half2>(beside), as<__half2>(0x64806480u)));
    } else {
      return bytes_less_128(word, b, b + 2);
    }
  }

 private:
/// Convert the last two bytes; NaN stays NaN.
  static __device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t bytes) {
    uint32_t halves = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bytes)));
#else  // a half has one exponent bit more and a bias greater by 8: times 2**8
    const uint32_t upper = __byte_perm(bytes, 0, 0x1404), small = (upper & 0x80008000) | (upper & 0x7F007F00) >> 1;
    const __half2 values = __hmul2(as<__half2>(small), as<__half2>(0x5C005C00u));
    halves = as<uint32_t>(values) | __hgt2_mask(__habs2(values), as<__half2>(0x5F005F00u));  // NaN beyond 448
#endif
    return halves;
  }
/// Convert halves with at most eight significant bits: the upper half of a float then has all of them.
  static __device__ __forceinline__ uint32_t bfloat16s_of(uint32_t halves) {
    const float2 both = __half22float2(as<__half2>(halves));
    return __byte_perm(__float_as_uint(both.x), __float_as_uint(both.y), 0x7632);
  }
};

}  // namespace qload::cuda
