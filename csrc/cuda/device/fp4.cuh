// Floats of four bits (e2m1) times scales of one byte (s0e5m3) as operands, exact in fp16 and bf16.
//
// The bits of a code in the places of a T's are a number, subnormal or not, that is 2**14 or 2**126 times too small. Those
// of a scale are a half as they are, and 2**112 times too small as a bfloat16: that is made up for by two products with
// powers of two, which leave a scale of up to 2**16 times 2**111. An operand is then 2**14 or 2**15 times too small, and has
// six digits at most. Scales have 2**15 for one: all in all a sum is 1 / kUnit of what it stands for.
//
// A tile of 128 rows has its scales side by side (layouts/strips.py): of a lane's columns c and c + 8 of 16 those of the
// four groups of 32 rows, two neighbouring bytes each; of groups of 16 first those of the upper ones of 32, then of the lower.
#pragma once

#include "number.cuh"

namespace qload::cuda {

constexpr int kScaledRows = 128;  // whose scales lie together

/// Bytes of scales of a column in 128 rows, and from the upper groups of 32 rows to the lower ones.
__host__ __device__ constexpr int column_scale_bytes(int group) { return kScaledRows / group; }
__host__ __device__ constexpr int lower_scales_at(int group) { return group == 16 ? 8 : 0; }

template <class T>
struct Fp4 {
  using Two = typename Number<T>::Two;
  static constexpr bool kHalf = Number<T>::kMagic == 0;
  static constexpr float kUnit = kHalf ? 0.5f : 1.0f;

  /// Scales of columns c and c + 8, of two groups of a word.
  static __device__ __forceinline__ uint32_t scales(uint32_t two_groups, int group) {
    const uint32_t bytes = __byte_perm(two_groups, 0, group ? 0x3424 : 0x1404);  // each the upper of a half
    if constexpr (kHalf) return bytes >> 1;
    return times(times(bytes >> 4, 0x77807780), 0x77007700);  // 2**112, 2**111
  }

  /// Codes of column c + 8b of a word of our own order, of those 32 rows apart (i): two neighbouring rows.
  static __device__ __forceinline__ uint32_t of(uint32_t word, int i, int b, uint32_t scales) {
    const int up = 12 - 4 * (2 * i + b), more = kHalf ? up - 3 : up - 6;  // to the sign, and to the other bits
    const uint32_t size = (more < 0 ? word >> -more : word << more) & (kHalf ? 0x0E000E00 : 0x01C001C0);
    return as<uint32_t>(__hmul2(as<Two>((word << up & 0x80008000) | size), half_of(scales, b)));
  }

 private:
  static __device__ __forceinline__ uint32_t times(uint32_t two, uint32_t others) {
    return as<uint32_t>(__hmul2(as<Two>(two), as<Two>(others)));
  }
  /// A scale in the half of a register that a product reads without another instruction.
  static __device__ __forceinline__ Two half_of(uint32_t both, int b) {
    if constexpr (kHalf)
      return b ? __high2half2(as<Two>(both)) : __low2half2(as<Two>(both));
    else
      return b ? __high2bfloat162(as<Two>(both)) : __low2bfloat162(as<Two>(both));
  }
};

}  // namespace qload::cuda
