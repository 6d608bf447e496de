// Words of Marlin's order as operands of a matrix product.
//
// A word has rows 2t, 2t + 1, 2t + 8, 2t + 9 of columns c and c + 8, its nibbles numbered r h b from the highest
// bit: row 2t + 8h + r, column c + 8b. Nibbles i and i + 4 are the neighbouring rows of one register of the
// 16 x 16 operand whose rows are outputs: registers (h, b) = (0, 0), (0, 1), (1, 0), (1, 1).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../device/ptx.cuh"

namespace qload::cuda {

template <class T>
struct Number;

// A code in the last bits of a half is 2**-24 of itself, and exact in a product. In a bfloat16 it is too small for
// that, but 128 + code has it in its last bits.
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

/// Two codes of a word, beside an offset.
__device__ __forceinline__ uint32_t two_codes(uint32_t word, uint32_t magic) {
  return masked_or<0x000F000F>(word, magic);
}

/// A constant that the compiler keeps in a register.
__device__ __forceinline__ uint32_t in_register(uint32_t constant) {
  asm volatile("mov.u32 %0, %0;" : "+r"(constant));
  return constant;
}

/// The operand of one word: codes times a unit, or plus an offset, as T has them.
__device__ __forceinline__ void operand_of(uint32_t word, uint32_t magic, uint32_t (&to)[4]) {
  to[0] = two_codes(word, magic);
  to[1] = two_codes(word >> 8, magic);
  to[2] = two_codes(word >> 4, magic);
  to[3] = two_codes(word >> 12, magic);
}

template <class T>
__device__ __forceinline__ uint32_t twice(T value) {
  return as<uint16_t>(value) * 0x10001u;
}

/// (code - zero) * scale of columns c and c + 8: the difference exact, the product rounded to T.
template <class T>
__device__ __forceinline__ void scale(uint32_t (&operand)[4], const uint32_t (&zeros)[2], const uint32_t (&scales)[2]) {
  using Two = typename Number<T>::Two;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    operand[i] = as<uint32_t>(__hmul2(__hsub2(as<Two>(operand[i]), as<Two>(zeros[i % 2])), as<Two>(scales[i % 2])));
}

/// A zero point twice, as codes are with `kExact`.
template <class T>
__device__ __forceinline__ uint32_t exact_zero(uint32_t zero) {
  return zero * 0x10001 | Number<T>::kExact;
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

template <class T>
__device__ __forceinline__ T narrow(float value) {
  if constexpr (Number<T>::kMagic == 0)
    return __float2half_rn(value);
  else
    return __float2bfloat16_rn(value);
}

}  // namespace qload::cuda
