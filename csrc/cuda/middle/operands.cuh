// Words of Marlin's order as operands in registers, scaled: scale * (code - zero), the difference exact, the product
// rounded to T.
//
// A lane has, of each strip of 16 columns, rows 2t, 2t + 1, 2t + 8, 2t + 9 of columns c and c + 8: of 4 bits in a word,
// nibbles numbered r b h from the highest bit; of 8 bits in a word for each of the two columns, bytes numbered r h.
// Registers of an operand: (h, b) = (0, 0), (0, 1), (1, 0), (1, 1), rows of r side by side.
#pragma once

#include "../w4a16/weights.cuh"

namespace qload::cuda {

template <class T>
constexpr bool is_half = Number<T>::kMagic == 0;

/// (word & mask) | magic in one instruction, if `magic` lies in a register.
template <uint32_t mask>
__device__ __forceinline__ uint32_t pick(uint32_t word, uint32_t magic) {
  uint32_t codes;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(codes) : "r"(word), "n"(mask), "r"(magic));
  return codes;
}

/// A zero point as codes are before it is taken off them.
template <class T, int bits>
__device__ __forceinline__ uint32_t zero_of(uint32_t zero) {
  if constexpr (bits == 8 && !is_half<T>) return 0x4B000000u | zero;  // of a float
  return zero * 0x10001 | Number<T>::kExact;
}

template <class T>
__device__ __forceinline__ uint32_t scaled(uint32_t codes, uint32_t zero, uint32_t scale) {
  using Two = typename Number<T>::Two;
  return as<uint32_t>(__hmul2(__hsub2(as<Two>(codes), as<Two>(zero)), as<Two>(scale)));
}

/// Two columns' zero points and scales, each twice in a register.
struct Columns {
  uint32_t zero[2], scale[2];
};

template <class T, bool has_zeros>
__device__ __forceinline__ void operand_of(const uint32_t (&word)[1], const Columns& at, uint32_t (&to)[4]) {
  constexpr uint32_t exact = Number<T>::kExact;
  if constexpr (is_half<T> && !has_zeros) {  // 64 + code lies four bits higher than 1024 + code: no shift for h
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t here = word[0] >> (8 * b);
      to[b] = scaled<T>(pick<0x000F000F>(here, exact), exact | 0x00080008, at.scale[b]);
      to[2 + b] = scaled<T>(pick<0x00F000F0>(here, 0x54005400), 0x54805480, at.scale[b]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t here = word[0] >> (8 * (i % 2) + 4 * (i / 2));
      const uint32_t zero = has_zeros ? at.zero[i % 2] : exact | 0x00080008;
      to[i] = scaled<T>(pick<0x000F000F>(here, exact), zero, at.scale[i % 2]);
    }
  }
}

template <class T, bool has_zeros>
__device__ __forceinline__ void operand_of(const uint32_t (&word)[2], const Columns& at, uint32_t (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int b = i % 2, h = i / 2;
    if constexpr (is_half<T>) {
      const uint32_t codes = __byte_perm(word[b], 0x64646464, h ? 0x4341 : 0x4240);
      to[i] = scaled<T>(codes, has_zeros ? at.zero[b] : 0x64806480, at.scale[b]);
    } else {  // eight bits are exact in a bfloat16, but not beside an offset
      const float zero = __uint_as_float(has_zeros ? at.zero[b] : 0x4B000080);
      const float low = __uint_as_float(__byte_perm(word[b], 0x4B000000, h ? 0x7651 : 0x7650)) - zero;
      const float high = __uint_as_float(__byte_perm(word[b], 0x4B000000, h ? 0x7653 : 0x7652)) - zero;
      to[i] = as<uint32_t>(__hmul2(__floats2bfloat162_rn(low, high), as<__nv_bfloat162>(at.scale[b])));
    }
  }
}

/// Of strips beside each other, in the group whose row of scales and zero points, of one tile of 64 columns, lies at
/// `scales` and `zeros`.
template <class T, int bits, bool has_zeros, int strips>
__device__ __forceinline__ void enter_group(const T* scales, const uint32_t* zeros, int first_strip, int c,
                                            bool grouped, Columns (&at)[strips]) {
  T own[2 * strips];  // columns 8 apart
  if (grouped) {
    memcpy(own, __builtin_assume_aligned(scales + c * 8 + 2 * first_strip, sizeof own), sizeof own);
  } else {  // one scale a column: n = 32 a + 8 j + 2 t + r lies at 32 a + 8 t + 2 j + r
#pragma unroll
    for (int i = 0; i < 2 * strips; ++i) {
      const int eighth = 2 * first_strip + i;
      own[i] = scales[eighth / 4 * 32 + c / 2 * 8 + eighth % 4 * 2 + c % 2];
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * strips; ++i) {
    const int strip = first_strip + i / 2, b = i % 2;
    at[i / 2].scale[b] = twice(own[i]);
    at[i / 2].zero[b] = 0;
    if constexpr (has_zeros && bits == 4) at[i / 2].zero[b] = zero_of<T, 4>(zeros[c] >> (4 * (4 * b + strip)) & 15);
    if constexpr (has_zeros && bits == 8)
      at[i / 2].zero[b] = zero_of<T, 8>(zeros[2 * c + strip / 2] >> (8 * (2 * b + strip % 2)) & 255);
  }
}

}  // namespace qload::cuda
