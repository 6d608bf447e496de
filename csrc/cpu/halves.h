// Conversions of 16-bit floats from and to float32, for any machine; one rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "../shared/float.h"

namespace qload::cpu {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

inline uint16_t float16_of(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  uint32_t half;
  if (magnitude > 0x7F800000) {
    half = 0x7E00;
  } else if (magnitude >= 0x477FF000) {  // 65520 and larger numbers round to infinity
    half = 0x7C00;
  } else if (magnitude < 0x38800000) {  // below 2**-14: a sum with 0.5 rounds to multiples of 2**-24
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

inline float of_bfloat16(uint16_t half) { return float_of(uint32_t{half} << 16); }

inline float of_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  if (magnitude < 0x400) {  // multiples of 2**-24
    const float small = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -small : small;
  }
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

inline float read_one(const void* from, Float type, int64_t at) {
  if (type == Float::kFloat32) return static_cast<const float*>(from)[at];
  const uint16_t half = static_cast<const uint16_t*>(from)[at];
  return type == Float::kFloat16 ? of_float16(half) : of_bfloat16(half);
}

}  // namespace
}  // namespace qload::cpu
