// Words of our own order as operands in registers, scaled: scale * (code - zero), the difference exact, the product
// rounded to T.
//
// A lane has rows 2u, 2u + 1 of eight of columns c and c + 8 (b), of eights 32 rows apart (i): nibbles numbered r i b
// from the highest bit. Registers of an operand: (h, b) = (0, 0), (0, 1), (1, 0), (1, 1), rows of r side by side; those
// of h lie in two words.
#pragma once

#include "../w4a16/weights.cuh"

namespace qload::cuda::many_room {

template <class T>
constexpr bool is_half = Number<T>::kMagic == 0;

// A code four bits higher in a half lies beside 64 as it does beside 1024: no shift.
constexpr uint32_t kHigher = 0x54005400;

/// What operands of two columns are made with: their scales side by side, and their zero points as codes have them.
template <class T>
struct Columns {
  uint32_t scales, zero[2];

  template <bool has_zeros>
  __device__ __forceinline__ void enter(uint32_t scales_of_both, uint32_t zeros, int strip) {
    scales = scales_of_both;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t point = has_zeros ? zeros >> (4 * (4 * b + strip)) & 15 : 8;
      zero[b] = is_half<T> && b ? point * 0x100010 | kHigher : point * 0x10001 | Number<T>::kExact;
    }
  }

  /// Left as halves of a register, which a product reads without another instruction.
  __device__ __forceinline__ uint32_t scale(int b) const {
    const auto both = as<__half2>(scales);
    return as<uint32_t>(b ? __high2half2(both) : __low2half2(both));
  }

  __device__ __forceinline__ uint32_t scaled(uint32_t codes, int b) const {
    using Two = typename Number<T>::Two;
    return as<uint32_t>(__hmul2(__hsub2(as<Two>(codes), as<Two>(zero[b])), as<Two>(scale(b))));
  }
};

/// Rows of two words, each of which has the codes it needs in the lower byte of its halves.
template <class T>
__device__ __forceinline__ void operand_of(uint32_t first, uint32_t second, const Columns<T>& at, uint32_t (&to)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t word = h ? second : first;
    to[2 * h] = at.scaled(masked_or<0x000F000F>(word, Number<T>::kExact), 0);
    if constexpr (is_half<T>)
      to[2 * h + 1] = at.scaled(masked_or<0x00F000F0>(word, kHigher), 1);
    else
      to[2 * h + 1] = at.scaled(masked_or<0x000F000F>(word >> 4, Number<T>::kExact), 1);
  }
}

}  // namespace qload::cuda::many_room
