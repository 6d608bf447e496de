// Words of our own order as operands in registers, scaled: scale * (code - zero), the difference exact, the product
// rounded to T.
//
// A lane has rows 2u, 2u + 1 of eight of columns c and c + 8 (b). Of 4 bits a word has them of eights 32 rows apart (i),
// nibbles numbered r i b from the highest bit; of 8 bits bytes r b. Registers of an operand: (h, b) = (0, 0), (0, 1),
// (1, 0), (1, 1), rows of r side by side; those of h lie in two words.
#pragma once

#include "../device/symmetric.cuh"
#include "../device/weights.cuh"

namespace qload::cuda::many_room {

// A code four bits higher in a half lies beside 64 as it does beside 1024: no shift.
constexpr uint32_t kHigher = 0x54005400;
constexpr uint32_t kFloat = 0x4B000000;  // a byte beside it is a float

/// What operands of two columns are made with: their scales side by side, and their zero points as codes have them.
template <class T, int bits>
struct Columns {
  uint32_t scales, zero[2];

  template <bool has_zeros>
  __device__ __forceinline__ void enter(uint32_t scales_of_both, uint32_t zeros, int strip) {
    scales = scales_of_both;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if constexpr (bits == 4) {
        const uint32_t point = has_zeros ? zeros >> (4 * (4 * b + strip)) & 15 : 8;
        zero[b] = is_half<T> && b ? point * 0x100010 | kHigher : point * 0x10001 | Number<T>::kExact;
      } else {
        const uint32_t point = has_zeros ? zeros >> (8 * (2 * b + strip % 2)) & 255 : 128;
        zero[b] = is_half<T> ? point * 0x10001 | Number<T>::kExact : point | kFloat;
      }
    }
  }

  /// Left as halves of a register, which a product reads without another instruction.
  __device__ __forceinline__ uint32_t scale(int b) const {
    const auto both = as<__half2>(scales);
    return as<uint32_t>(b ? __high2half2(both) : __low2half2(both));
  }

  /// Of a word, what stands for column c + 8b.
  __device__ __forceinline__ uint32_t of(uint32_t word, int b) const {
    if constexpr (bits == 8) return scaled_bytes(word, b);
    if constexpr (is_half<T>)
      return scaled(b ? masked_or<0x00F000F0>(word, kHigher) : masked_or<0x000F000F>(word, Number<T>::kExact), b);
    else
      return scaled(masked_or<0x000F000F>(b ? word >> 4 : word, Number<T>::kExact), b);
  }

 private:
  /// Of codes beside an offset.
  __device__ __forceinline__ uint32_t scaled(uint32_t codes, int b) const {
    using Two = typename Number<T>::Two;
    return times(as<uint32_t>(__hsub2(as<Two>(codes), as<Two>(zero[b]))), b);
  }

  /// Of the bytes `b` and `b + 2` of a word.
  __device__ __forceinline__ uint32_t scaled_bytes(uint32_t word, int b) const {
    if constexpr (is_half<T>) {
      return scaled(__byte_perm(word, 0x64646464, b ? 0x4341 : 0x4240), b);
    } else {  // eight bits are exact in a bfloat16, but not beside an offset
      const float low = __uint_as_float(__byte_perm(word, kFloat, 0x7650 | b)) - __uint_as_float(zero[b]);
      const float high = __uint_as_float(__byte_perm(word, kFloat, 0x7652 | b)) - __uint_as_float(zero[b]);
      return times(__byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632), b);
    }
  }

  __device__ __forceinline__ uint32_t times(uint32_t two, int b) const {
    using Two = typename Number<T>::Two;
    return as<uint32_t>(__hmul2(as<Two>(two), as<Two>(scale(b))));
  }
};

}  // namespace qload::cuda::many_room
