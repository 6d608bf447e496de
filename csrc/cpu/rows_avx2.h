// Rows of codes in registers of AVX2.
#pragma once

#include "lanes_avx2.h"
#include "rows_few.h"

namespace qload::cpu {
namespace {

/// 8-bit codes for a conversion instruction: `How::halves` converts 16 codes to two registers of 8 floats.
template <class How>
struct Converted : FloatInputs<LanesAvx2> {
  using S = LanesAvx2;
  static constexpr int kParts = 4, kBlock = 32, kBytes = 32, kSpan = 32, kLanesOfSpan = 8;
  static constexpr float kFactor = How::kFactor;
  struct Block {
    __m256i first, second;  // halves of 16 codes
  };

  explicit Converted(const Meaning&) {}
  static bool reads(const Meaning& m) {
    if (m.bits != 8 || (m.zero && kFactor != 1)) return false;
    for (int code = 0; code < 256; ++code) {
      const float value = m.lookup ? m.lookup[code] : static_cast<float>(code);
      const float own = How::number(code);
      if (value != own && (value == value || own == own)) return false;
    }
    return true;
  }

  static int code(int at, const Meaning&) { return at; }

  Block load(const uint8_t* from) const {
    const auto* const halves = reinterpret_cast<const __m128i*>(from);
    return {How::wide(_mm_loadu_si128(halves)), How::wide(_mm_loadu_si128(halves + 1))};
  }

  S::Floats value(const Block& block, int part) const {
    const __m256i both = part < 2 ? block.first : block.second;
    return How::floats(part % 2 ? _mm256_extracti128_si256(both, 1) : _mm256_castsi256_si128(both));
  }
};

struct Signed {  // integers
  static constexpr float kFactor = 1;
  static float number(int code) { return static_cast<float>(code < 128 ? code : code - 256); }
  static __m256i wide(__m128i codes) { return _mm256_cvtepi8_epi16(codes); }
  static __m256 floats(__m128i eight) { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(eight)); }
};

struct Unsigned {
  static constexpr float kFactor = 1;
  static float number(int code) { return static_cast<float>(code); }
  static __m256i wide(__m128i codes) { return _mm256_cvtepu8_epi16(codes); }
  static __m256 floats(__m128i eight) { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(eight)); }
};

/// FP8 with 4 bits of exponent: a shift of its bits gives a float16 of 2**-8 times the value, except for NaN.
struct E4M3 {
  static constexpr float kFactor = 256;
  static float number(int code) {
    if ((code & 127) == 127) return __builtin_nanf("");
    const int exponent = code >> 3 & 15, part = code & 7;
    const float size = exponent ? static_cast<float>(8 + part) * static_cast<float>(1 << exponent) / 1024.0f
                                : static_cast<float>(part) / 512.0f;
    return code < 128 ? size : -size;
  }
  static __m256i wide(__m128i codes) {
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_or_si256(half, _mm256_set1_epi16(static_cast<int16_t>(0xC000))),
                                           _mm256_set1_epi16(static_cast<int16_t>(0xFF80)));
    return _mm256_or_si256(_mm256_and_si256(half, _mm256_set1_epi16(static_cast<int16_t>(0xBFFF))),
                           _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
  }
  static __m256 floats(__m128i eight) { return _mm256_cvtph_ps(eight); }
};

/// FP8 with 5 bits of exponent: the upper byte of a float16.
struct E5M2 {
  static constexpr float kFactor = 1;
  static float number(int code) {
    return _mm256_cvtss_f32(_mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(code << 8))));
  }
  static __m256i wide(__m128i codes) { return _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8); }
  static __m256 floats(__m128i eight) { return _mm256_cvtph_ps(eight); }
};

inline bool few_rows(const Meaning& m, Float, FewRows& way) {
  return takes<Sixteen<LanesAvx2>>(m, way) || takes<Converted<E4M3>>(m, way) || takes<Converted<Signed>>(m, way) ||
         takes<Converted<Unsigned>>(m, way) || takes<Converted<E5M2>>(m, way);
}

}  // namespace
}  // namespace qload::cpu
