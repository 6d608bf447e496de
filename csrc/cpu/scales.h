// Conversion of scales stored as bytes to float32.
//
//   exponents   2**(byte - 127), 255: NaN        (e8m0)
//   floats      4 bits of exponent, 3 of mantissa; 127 and 255: NaN   (e4m3fn)
//
// Each is multiplied by a second scale, or divided by it, and rounded once. Equals the scales of the formats
// (qload/layouts/fp4.py, qload/formats/nvfp4.py), bit for bit, in loops that a compiler vectorizes.
#pragma once

#include <cstdint>

#include "halves.h"
#include "kernels.h"

namespace qload::cpu {
namespace {

inline float of_exponent(uint32_t byte) {
  return float_of(byte << 23 | (byte == 0 || byte == 255 ? 1u << 22 : 0));
}

/// Exponent 0 has no leading 1: the code adds one and subtracts it again. There is no branch, since a branch would keep
/// a compiler from vectorizing.
inline float of_e4m3(uint32_t byte) {
  const uint32_t size = byte & 127, small = size < 8 ? 0xFFFFFFFF : 0;
  const uint32_t with = size == 127 ? 0x7FC00000 : (120u << 23) + (small & 1u << 23) + (size << 20);
  const float value = float_of(with) - float_of(small & 121u << 23);
  return float_of(bits_of(value) | (byte & 128) << 24);
}

template <float (*kOf)(uint32_t)>
void scales_of(const ByteScales& scales, int64_t first, int64_t count, float* to) {
  const uint8_t* const from = scales.bytes + first;
  for (int64_t i = 0; i < count; ++i) to[i] = kOf(from[i]);
  if (scales.divided)
    for (int64_t i = 0; i < count; ++i) to[i] /= scales.second;
  else if (scales.second != 1)
    for (int64_t i = 0; i < count; ++i) to[i] *= scales.second;
}

inline void spell_scales(const ByteScales& scales, int64_t first, int64_t count, float* to) {
  const auto way = scales.kind == ByteScales::kExponents ? scales_of<of_exponent> : scales_of<of_e4m3>;
  way(scales, first, count, to);
}

inline SpellScales plain_scales(const ByteScales&) { return spell_scales; }

}  // namespace
}  // namespace qload::cpu
