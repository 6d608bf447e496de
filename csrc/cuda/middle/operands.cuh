// Words as operands in registers, scaled: scale * (code - zero), the difference exact, the product rounded to T.
//
// A lane has, of each strip of 16 columns, rows 2t, 2t + 1, 2t + 8, 2t + 9 of 16 of columns c and c + 8. Of 4 bits they
// are in a word, nibbles numbered r b h from the highest bit; of 8 bits in a word for each of the two columns, bytes
// numbered r h.
// Registers of an operand: (h, b) = (0, 0), (0, 1), (1, 0), (1, 1), rows of r side by side.
#pragma once

#include "../w4a16/weights.cuh"

namespace qload::cuda::middle_room {

template <class T>
constexpr bool is_half = Number<T>::kMagic == 0;

template <class T>
__device__ __forceinline__ uint32_t scaled(uint32_t codes, uint32_t zero, uint32_t scale) {
  using Two = typename Number<T>::Two;
  return as<uint32_t>(__hmul2(__hsub2(as<Two>(codes), as<Two>(zero)), as<Two>(scale)));
}

/// Scales of two columns side by side, and their zero points, each twice, as codes are before these are taken off.
struct Columns {
  uint32_t scales, zero[2];

  /// Left as halves of a register, which a product reads without another instruction.
  __device__ __forceinline__ uint32_t scale(int b) const {
    const auto both = as<__half2>(scales);
    return as<uint32_t>(b ? __high2half2(both) : __low2half2(both));
  }
};

// A code four bits higher in a half lies beside 64 as it does beside 1024: no shift.
constexpr uint32_t kHigher = 0x54005400;

/// A zero point as codes have it.
template <class T, int bits>
__device__ __forceinline__ uint32_t zero_of(uint32_t zero) {
  if constexpr (bits == 8 && !is_half<T>) return 0x4B000000u | zero;  // of a float
  return zero * 0x10001 | Number<T>::kExact;
}

template <class T, bool has_zeros>
__device__ __forceinline__ void operand_of(const uint32_t (&word)[1], const Columns& at, uint32_t (&to)[4]) {
  constexpr uint32_t exact = Number<T>::kExact;
  if constexpr (is_half<T> && !has_zeros) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t here = word[0] >> (8 * i);
      to[i] = scaled<T>(masked_or<0x000F000F>(here, exact), exact | 0x00080008, at.scale(i));
      to[i + 2] = scaled<T>(masked_or<0x00F000F0>(here, kHigher), kHigher | 0x00800080, at.scale(i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t here = word[0] >> (8 * (i % 2) + 4 * (i / 2));
      const uint32_t zero = has_zeros ? at.zero[i % 2] : exact | 0x00080008;
      to[i] = scaled<T>(masked_or<0x000F000F>(here, exact), zero, at.scale(i % 2));
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
      to[i] = scaled<T>(codes, has_zeros ? at.zero[b] : 0x64806480, at.scale(b));
    } else {  // eight bits are exact in a bfloat16, but not beside an offset
      const float zero = __uint_as_float(has_zeros ? at.zero[b] : 0x4B000080);
      const float low = __uint_as_float(__byte_perm(word[b], 0x4B000000, h ? 0x7651 : 0x7650)) - zero;
      const float high = __uint_as_float(__byte_perm(word[b], 0x4B000000, h ? 0x7653 : 0x7652)) - zero;
      to[i] = as<uint32_t>(__hmul2(__floats2bfloat162_rn(low, high), as<__nv_bfloat162>(at.scale(b))));
    }
  }
}

}  // namespace qload::cuda::middle_room
