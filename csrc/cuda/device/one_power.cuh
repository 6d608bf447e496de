// Operands of symmetric.cuh with one common power of two for all columns of a warp. It takes one register, and one
// addition to the exponents of two scales, or two products where a scale is too small for an addition.
#pragma once

#include "symmetric.cuh"

namespace qload::cuda {

template <class T>
class OnePower {
 public:
  using Strip = Symmetric<T, 4>;

/// Choose the power for the first group of a warp's columns.
  __device__ __forceinline__ void begin(const uint32_t (&stored)[4]) { set(Extremes(stored)); }

/// Begin a group. Return false if a scale may not fit; the caller then calls `move`. A subnormal scale or an overflow
/// has a small exponent after the addition; an infinite scale or NaN has the largest one, and `most` detects it.
  __device__ __forceinline__ bool enter(const uint32_t (&stored)[4], Strip (&at)[4]) const {
    Two least, most;
    if (add_) {
#pragma unroll
      for (int j = 0; j < 4; ++j) at[j].lay(stored[j] + add_);
    } else {
      lay_products(stored, at);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Two size = __habs2(as<Two>(at[j].scales));
      least = j ? __hmin2(least, size) : size, most = j ? __hmax2_nan(most, size) : size;
    }
    return Strip::fit(least, most);
  }

/// Begin a group with scales that may not fit: choose another power and rescale the sums. Zeros always fit. Return
/// false if no power fits all scales.
  template <int values>
  __device__ __forceinline__ bool move(const uint32_t (&stored)[4], Strip (&at)[4], float (&sums)[values]) {
    const Extremes scales(stored);
    if (add_ && is_tiny(scales)) add_ = 0;
    if (!fit(scales)) {
      const int was = power_;
      set(scales);
      const float more = two_to(max(-126, min(127, power_ - was)));
#pragma unroll
      for (int i = 0; i < values; ++i) sums[i] *= more;
    }
    lay_products(stored, at);
    return fit(scales);
  }

/// Factor that removes the power from a sum.
  __device__ __forceinline__ float unit() const { return two_to(Span<T>::kCode - power_); }

 private:
  using Two = typename Strip::Two;
// A zero has a lower exponent than any scale that fits, after any addition. Products have a larger range.
  static constexpr int kLowest = is_half<T> ? 4 : 6, kHighest = is_half<T> ? 24 : 126;
  static constexpr int kNormal = is_half<T> ? -14 : -126;

/// The smallest nonzero scale of a warp, and the largest.
  struct Extremes {
    float least, most;
    __device__ __forceinline__ explicit Extremes(const uint32_t (&stored)[4]) {
      uint32_t small = ~0u, large = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t size = __float_as_uint(Strip::size_of(stored[i / 2], i % 2));
        small = min(small, size - 1), large = max(large, size);  // zero minus one wraps to the largest value
      }
      least = __uint_as_float(__reduce_min_sync(~0u, small) + 1), most = __uint_as_float(__reduce_max_sync(~0u, large));
    }
  };

  __device__ __forceinline__ void set(const Extremes& scales) {
    const bool tiny = is_tiny(scales);
    power_ = max(kLowest, min(tiny ? Strip::kHighest : kHighest, Strip::power_for(scales.most, true)));
    add_ = uint32_t(power_) << Span<T>::kDigits | uint32_t(power_ - Strip::kHigher) << Span<T>::kDigits << 16;
    if (tiny) add_ = 0;
  }
  static __device__ __forceinline__ bool is_tiny(const Extremes& scales) { return scales.least < two_to(kNormal); }

  __device__ __forceinline__ void lay_products(const uint32_t (&stored)[4], Strip (&at)[4]) const {
    const int half = power_ / 2;
    const uint32_t first = Strip::both(half, half), second = Strip::both(power_ - half);
#pragma unroll
    for (int j = 0; j < 4; ++j) at[j].lay(Strip::times(Strip::times(stored[j], first), second));
  }
  __device__ __forceinline__ bool fit(const Extremes& scales) const {
    return scales.most == 0 || (scales.least * two_to(power_) >= two_to(Span<T>::kLeast) &&
                                scales.most * two_to(power_) < two_to(Span<T>::kMost));
  }

  int power_;
  uint32_t add_;  // 0: multiply the scales instead
};

}  // namespace qload::cuda
