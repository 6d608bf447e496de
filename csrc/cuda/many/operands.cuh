// Scaled operands in registers from words of strips: scale * (code - zero) - offset, the difference exact, the rest
// rounded to T once.
//
// A lane has rows 2u, 2u + 1 of eight of columns c and c + 8 (b). With 4 bits a word has them for eights 32 rows apart
// (i), nibbles numbered r i b from the highest bit; with 8 bits bytes r b. Registers of an operand: (h, b) = (0, 0),
// (0, 1), (1, 0), (1, 1), rows of r side by side; both values of h are in different words.
#pragma once

#include "../device/symmetric.cuh"
#include "../device/weights.cuh"

namespace qload::cuda::many_room {

// A code four bits higher in a half, with an offset of 64 instead of 1024, needs no shift.
constexpr uint32_t kHigher = 0x54005400;
constexpr uint32_t kFloat = 0x4B000000;  // with a byte in its last bits it is a float

/// Scales and zero points of two columns, side by side, for operands.
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

  /// The scale as a half of a register, which a product reads without another instruction.
  __device__ __forceinline__ uint32_t scale(int b) const {
    const auto both = as<__half2>(scales);
    return as<uint32_t>(b ? __high2half2(both) : __low2half2(both));
  }

  /// Operand of column c + 8b from a word.
  __device__ __forceinline__ uint32_t of(uint32_t word, int b) const {
    if constexpr (bits == 8) return scaled_bytes(word, b);
    if constexpr (is_half<T>)
      return scaled(b ? masked_or<0x00F000F0>(word, kHigher) : masked_or<0x000F000F>(word, Number<T>::kExact), b);
    else
      return scaled(masked_or<0x000F000F>(b ? word >> 4 : word, Number<T>::kExact), b);
  }

 private:
  /// Operand from codes with an offset.
  __device__ __forceinline__ uint32_t scaled(uint32_t codes, int b) const {
    using Two = typename Number<T>::Two;
    return times(as<uint32_t>(__hsub2(as<Two>(codes), as<Two>(zero[b]))), b);
  }

  /// Operand from bytes `b` and `b + 2` of a word.
  __device__ __forceinline__ uint32_t scaled_bytes(uint32_t word, int b) const {
    if constexpr (is_half<T>) {
      return scaled(__byte_perm(word, 0x64646464, b ? 0x4341 : 0x4240), b);
    } else {  // eight bits are exact in a bfloat16, but not with an offset
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

/// Codes of two columns minus one zero point, exact.
template <class T, int bits>
struct Differences {
  using Two = typename Number<T>::Two;
  static constexpr bool kFloats = bits == 8 && !is_half<T>;  // eight bits are exact in a bfloat16, but not with an offset
  uint32_t zero[2];

  __device__ __forceinline__ void lay(uint32_t point) {
    zero[0] = kFloats ? point | kFloat : point * 0x10001 | Number<T>::kExact;
    zero[1] = bits == 4 && is_half<T> ? point * 0x100010 | kHigher : zero[0];
  }

  /// Codes of column c + 8b from a word.
  __device__ __forceinline__ Two of(uint32_t word, int b) const {
    if constexpr (kFloats) {
      const float2 both = floats_of(word, b);
      return as<Two>(__byte_perm(__float_as_uint(both.x), __float_as_uint(both.y), 0x7632));
    } else {
      return __hsub2(as<Two>(beside(word, b)), as<Two>(zero[b]));
    }
  }
  __device__ __forceinline__ float2 floats_of(uint32_t word, int b) const {
    if constexpr (kFloats)
      return {__uint_as_float(__byte_perm(word, kFloat, 0x7650 | b)) - __uint_as_float(zero[b]),
              __uint_as_float(__byte_perm(word, kFloat, 0x7652 | b)) - __uint_as_float(zero[b])};
    else if constexpr (is_half<T>)
      return __half22float2(of(word, b));
    else
      return __bfloat1622float2(of(word, b));
  }

 private:
  /// Codes with an offset, in the form of zero points.
  static __device__ __forceinline__ uint32_t beside(uint32_t word, int b) {
    if constexpr (bits == 8)
      return __byte_perm(word, 0x64646464, b ? 0x4341 : 0x4240);
    else if constexpr (is_half<T>)
      return b ? masked_or<0x00F000F0>(word, kHigher) : masked_or<0x000F000F>(word, Number<T>::kExact);
    else
      return masked_or<0x000F000F>(b ? word >> 4 : word, Number<T>::kExact);
  }
};

/// Scales of two columns, side by side, and negated offsets, for operands.
template <class T, int bits>
struct OffsetColumns {
  Differences<T, bits> codes;
  uint32_t scales, less;

  __device__ __forceinline__ void enter(uint32_t scales_of_both, uint32_t offsets, int zero) {
    scales = scales_of_both, less = offsets ^ 0x80008000;
    codes.lay(zero);
  }

  /// Operand of column c + 8b from a word.
  __device__ __forceinline__ uint32_t of(uint32_t word, int b) const {
    return as<uint32_t>(__hfma2(codes.of(word, b), half_of(scales, b), half_of(less, b)));
  }

 private:
  using Two = typename Number<T>::Two;

  /// The scale as a half of a register, which a product reads without another instruction.
  static __device__ __forceinline__ Two half_of(uint32_t both, int b) {
    const auto two = as<__half2>(both);
    return as<Two>(b ? __high2half2(two) : __low2half2(two));
  }
};

}  // namespace qload::cuda::many_room
