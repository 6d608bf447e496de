// Floats as sums of bfloat16, two in a word.
#pragma once

#include <cstdint>

#include "halves.h"

namespace qload::cpu {
namespace {

/// The upper half of a float, and the remainder, 0 for a float that is not finite.
inline uint32_t upper_of(float value, float& left) {
  uint32_t bits = bits_of(value);
  const bool finite = (bits >> 23 & 255) != 255;
  if (value != value) bits |= 1u << 22;
  const uint32_t upper = bits & 0xFFFF0000;
  left = finite ? value - float_of(upper) : 0;
  return upper >> 16;
}

/// The upper halves of two floats, and their remainders.
inline uint32_t pair_of(float& first, float& second) {
  const uint32_t low = upper_of(first, first), high = upper_of(second, second);
  return low | high << 16;
}

}  // namespace
}  // namespace qload::cpu
