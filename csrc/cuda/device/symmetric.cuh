// Operands from words of strips with all zero points at 2**(bits - 1): an AND or a byte permutation, and one fma.
//
// A code in the last bits of a half or bfloat16 is a subnormal number: code * 2**-24, or code * 2**-133. Scales are
// multiplied by a power of two, so that scale * code - scale * zero is not subnormal and is rounded once, like the
// product of the exact difference; a power of two changes no digit. fp16 has room for scales of a column that differ by a
// factor of up to 64. For a scale that does not fit, the column gets another power and its sums are rescaled.
#pragma once

#include "number.cuh"

namespace qload::cuda {

template <class T>
constexpr bool is_half = Number<T>::kMagic == 0;

/// Powers of two for T: of a bare code; the range [least, most) of scales; the target for the largest scales, with room
/// for larger ones; and the target for the smallest.
template <class T>
struct Span {
  static constexpr int kCode = is_half<T> ? 24 : 133;
  static constexpr int kLeast = is_half<T> ? 10 : 7, kMost = is_half<T> ? 16 : 128;
  static constexpr int kLarge = is_half<T> ? 14 : 120, kSmall = is_half<T> ? 10 : 90;
  static constexpr int kDigits = is_half<T> ? 10 : 7, kBias = is_half<T> ? 15 : 127;
};

/// 2**power, for the exponents of a normal float.
__device__ __forceinline__ float two_to(int power) { return __int_as_float((power + 127) << 23); }

/// Scales for operands of columns c and c + 8 (b). Codes of column c + 8 are shifted up by `kHigher` bits, so its scale
/// is smaller by as much.
template <class T, int bits>
struct Symmetric {
  using Two = typename Number<T>::Two;
  static constexpr int kHigher = bits == 4 ? 4 : 0, kLowest = is_half<T> ? -20 : 6;
  static constexpr int kHighest = is_half<T> ? 30 : 126;

  static __device__ __forceinline__ uint32_t times(uint32_t two, uint32_t others) {
    return as<uint32_t>(__hmul2(as<Two>(two), as<Two>(others)));
  }

/// Powers of two of both columns, the second one smaller.
  static constexpr __device__ uint32_t both(int first, int second) {
    return uint32_t(first + Span<T>::kBias) << Span<T>::kDigits | uint32_t(second + Span<T>::kBias) << Span<T>::kDigits << 16;
  }
  static constexpr __device__ uint32_t both(int power) { return both(power, power - kHigher); }

/// Whether all scales between these sizes fit.
  static __device__ __forceinline__ bool fit(Two least, Two most) {
    return __hbge2(least, as<Two>(both(Span<T>::kLeast))) && __hblt2(most, as<Two>(both(Span<T>::kMost)));
  }

/// The power that makes a scale one of the largest, or of the smallest, that fit.
  static __device__ __forceinline__ int power_for(float size, bool large) {
    const int number = __float_as_int(size), exponent = (number >> 23) - 127;
    const int place = large ? Span<T>::kLarge + ((number & 0x7FFFFF) < 0x350000) : Span<T>::kSmall;  // 2**0.5
    return max(kLowest, min(kHighest, place - exponent));
  }

  uint32_t power[2];  // scales are multiplied by the product of both
  uint32_t scales, less;

/// Begin a group with stored scales. Return false if one may not fit; the caller then calls `move`.
  __device__ __forceinline__ bool enter(uint32_t stored) {
    lay(times(times(stored, power[0]), power[1]));
    const Two size = __habs2(as<Two>(scales));
    return fit(size, size);
  }

/// Set scales that are already multiplied.
  __device__ __forceinline__ void lay(uint32_t multiplied) {
    scales = multiplied;
    less = times(scales, bits == 4 ? 0x80808008 : 0x80808080);  // minus scale * zero
  }

/// Begin the first group; `largest`: the largest scale of some columns.
  __device__ __forceinline__ void begin(uint32_t stored, float largest) {
    const int power = power_for(largest, true), powers[2] = {power, power};
    set(powers);
    if (enter(stored)) return;
    float none[1];
    move<true>(stored, none, [] {});
  }

/// Choose another power for scales that do not fit, and rescale a lane's sums, with columns c and c + 8 in alternating
/// pairs. `settle()` waits for products in flight. `first`: there are no sums yet.
  template <bool first = false, int values, class Settle>
  __device__ __forceinline__ void move(uint32_t stored, float (&sums)[values], const Settle& settle) {
    int was[2], now[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float size = size_of(stored, b), larger = size * two_to(was[b] = power_of(b));
      const bool large = larger >= two_to(Span<T>::kMost);
      now[b] = large || (size > 0 && larger < two_to(Span<T>::kLeast)) ? power_for(size, large) : was[b];
    }
    if constexpr (first) {
      set(now);
    } else if (__any_sync(~0u, was[0] != now[0] || was[1] != now[1])) {
      settle();
      const float more[2] = {two_to(max(-126, min(127, now[0] - was[0]))), two_to(max(-126, min(127, now[1] - was[1])))};
#pragma unroll
      for (int i = 0; i < values; ++i) sums[i] *= more[i / 2 % 2];
      set(now);
    }
    enter(stored);
  }

/// Absolute value of a stored scale.
  static __device__ __forceinline__ float size_of(uint32_t stored, int b) {
    return fabsf(wide(as<T>(static_cast<uint16_t>(stored >> 16 * b))));
  }

/// Factor that removes the powers from a sum of column c + 8b.
  __device__ __forceinline__ float unit(int b) const { return two_to(Span<T>::kCode - power_of(b)); }

/// Remove the powers from all sums.
  template <int values>
  __device__ __forceinline__ void leave(float (&sums)[values]) const {
    const float units[2] = {unit(0), unit(1)};
#pragma unroll
    for (int i = 0; i < values; ++i) sums[i] *= units[i / 2 % 2];
  }

/// Operand of column c + 8b from a word.
  __device__ __forceinline__ uint32_t of(uint32_t word, int b) const {
    const uint32_t codes = bits == 8 ? __byte_perm(word, 0, b ? 0x4341 : 0x4240) : word & (b ? 0x00F000F0 : 0x000F000F);
    return as<uint32_t>(__hfma2(as<Two>(codes), half_of(scales, b), half_of(less, b)));
  }

 private:
/// A scale in the half of a register that a product reads without another instruction.
  static __device__ __forceinline__ Two half_of(uint32_t both, int b) {
    if constexpr (is_half<T>)
      return b ? __high2half2(as<Two>(both)) : __low2half2(as<Two>(both));
    else
      return b ? __high2bfloat162(as<Two>(both)) : __low2bfloat162(as<Two>(both));
  }

  __device__ __forceinline__ void set(const int (&powers)[2]) {
    const int less[2] = {powers[0], powers[1] - kHigher};
    power[0] = both(less[0] / 2, less[1] / 2), power[1] = both(less[0] - less[0] / 2, less[1] - less[1] / 2);
  }

/// The power of column c + 8b.
  __device__ __forceinline__ int power_of(int b) const {
    const auto exponent = [&](uint32_t of) { return static_cast<int>(of >> (16 * b + Span<T>::kDigits)) & (2 * Span<T>::kBias + 1); };
    return exponent(power[0]) + exponent(power[1]) - 2 * Span<T>::kBias + b * kHigher;
  }
};

/// Begin the first group of a warp's strips.
template <class T, int bits, int strips>
__device__ __forceinline__ void begin(Symmetric<T, bits> (&at)[strips], const uint32_t (&stored)[strips]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 2 * strips; ++i) largest = fmaxf(largest, at[0].size_of(stored[i / 2], i % 2));
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
#pragma unroll
  for (int j = 0; j < strips; ++j) at[j].begin(stored[j], largest);
}

/// Begin the next group of a warp's strips, with a lane's `sums`.
template <class T, int bits, int strips, int values, class Settle>
__device__ __forceinline__ void enter(Symmetric<T, bits> (&at)[strips], const uint32_t (&stored)[strips],
                                      float (&sums)[strips][values], const Settle& settle) {
  bool fits = true;
#pragma unroll
  for (int j = 0; j < strips; ++j) fits &= at[j].enter(stored[j]);
  if (__any_sync(~0u, !fits))
#pragma unroll
    for (int j = 0; j < strips; ++j) at[j].move(stored[j], sums[j], settle);
}

/// Operand from two words, each with 4-bit codes in the lower byte of its halves. `at` maps a word's codes of column
/// c + 8b to values.
template <class Scaled>
__device__ __forceinline__ void operand_of(uint32_t first, uint32_t second, const Scaled& at, uint32_t (&to)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) to[2 * h] = at.of(h ? second : first, 0), to[2 * h + 1] = at.of(h ? second : first, 1);
}

}  // namespace qload::cuda
