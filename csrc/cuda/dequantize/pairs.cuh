// Two codes at a time in 16-bit arithmetic, bit-equal to a float32 product rounded once.
//
//   fp16   out = (code - zero) * scale                  the difference is exact, so the product is rounded once
//   bf16   out = difference * upper + (difference * lower)
//
// upper + lower is the scale: its eight leading bits and the remainder, exact for a scale in fp16. For codes of up to 4
// bits difference * lower is exact, so the sum is rounded once. `lower` has the sign of the scale, which gives zeros the
// sign of float32 products; for an infinite scale it is 0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qload::cuda {

template <class Out>
struct Pairs {
  static constexpr int most_bits = 0;  // no pairs
};

template <>
struct Pairs<__half> {
  static constexpr uint32_t base = 0x64006400;  // 1024 + code has the code in its last bits
  static constexpr int most_bits = 8;

  __device__ static uint2 shared(uint16_t scale, bool, int zero) {
    const __half2 value = __half2half2(__ushort_as_half(scale));
    const __half2 offset = __half2half2(__int2half_rn(1024 + zero));
    return {*reinterpret_cast<const uint32_t*>(&value), *reinterpret_cast<const uint32_t*>(&offset)};
  }

  __device__ static uint32_t values(uint32_t codes, uint2 shared) {
    const __half2 difference = __hsub2(as(codes), as(shared.y));
    const __half2 product = __hmul2(difference, as(shared.x));
    return *reinterpret_cast<const uint32_t*>(&product);
  }

 private:
  __device__ static __half2 as(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
};

template <>
struct Pairs<__nv_bfloat16> {
  static constexpr uint32_t base = 0x43004300;  // 128 + code
  static constexpr int most_bits = 4;

  __device__ static uint2 shared(uint16_t scale, bool bfloat16, int zero) {
    const uint32_t wide =
        bfloat16 ? uint32_t{scale} << 16 : __float_as_uint(__half2float(__ushort_as_half(scale)));
    const uint32_t upper = wide & 0xFFFF0000, sign = wide & 0x80000000;
    const bool finite = (wide & 0x7F800000) != 0x7F800000;
    const float left = finite ? __uint_as_float(wide) - __uint_as_float(upper) : 0.0f;
    const uint32_t lower = __float_as_uint(left) | sign;
    const __nv_bfloat162 offset = __bfloat162bfloat162(__int2bfloat16_rn(128 + zero));
    return {upper | lower >> 16, *reinterpret_cast<const uint32_t*>(&offset)};
  }

  __device__ static uint32_t values(uint32_t codes, uint2 shared) {
    const __nv_bfloat162 difference = __hsub2(as(codes), as(shared.y));
    const __nv_bfloat162 upper = __high2bfloat162(as(shared.x)), lower = __low2bfloat162(as(shared.x));
    const __nv_bfloat162 sum = __hfma2(difference, upper, __hmul2(difference, lower));
    return *reinterpret_cast<const uint32_t*>(&sum);
  }

 private:
  __device__ static __nv_bfloat162 as(uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }
};

}  // namespace qload::cuda
