// Conversion of scales stored as bytes, 16 at once in registers of AVX-512, to the float32 of scales.h.
#pragma once

#include <immintrin.h>

#include "scales.h"

namespace qload::cpu {
namespace {

/// Exponents, one for each 32 codes.
struct Exponents {
  static constexpr int kRun = 32;
  explicit Exponents(const ByteScales&) {}
  static bool is_of(const ByteScales& scales) { return scales.kind == ByteScales::kExponents && !scales.divided; }
  __m512 of(__m128i bytes) const {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(1 << 22)));
  }
  static __mmask64 none(__m512i bytes) { return _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(-1)); }
};

/// 8-bit floats, one for each 16 codes. Shifted to the fields of a float16, their bits give 2**-8 times the number.
template <bool kDivided>
struct Bytes8 {
  static constexpr int kRun = 16;
  __m512 factor, second;

  explicit Bytes8(const ByteScales& scales)
      : factor(_mm512_set1_ps((kDivided ? 1 / scales.second : scales.second) * 0x1p8f)),
        second(_mm512_set1_ps(scales.second * 0x1p-8f)) {}
  static bool is_of(const ByteScales& scales) { return scales.kind == ByteScales::kE4m3 && scales.divided == kDivided; }

  __m512 of(__m128i bytes) const {
    const __m256i raised = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // with two copies of the sign
    const __m512 small = _mm512_cvtph_ps(_mm256_and_si256(raised, _mm256_set1_epi16(static_cast<int16_t>(0xBFFF))));
    const __m512 near = _mm512_mul_ps(small, factor);
    if constexpr (!kDivided) return near;
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(near, second, small), factor, near);  // adds the rounding error back
  }
  static __mmask64 none(__m512i bytes) {
    const __m512i size = _mm512_set1_epi8(127);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512(bytes, size), size);
  }
};

/// Whether `Scales` converts every byte as scales.h does, bit for bit except for the sign of zeros.
template <class Scales>
bool agrees(const ByteScales& scales) {
  if (!Scales::is_of(scales)) return false;
  alignas(64) uint8_t bytes[256];
  alignas(64) float here[256], there[256];
  for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
  const ByteScales all{bytes, scales.kind, scales.second, scales.divided};
  const Scales own(scales);
  spell_scales(all, 0, 256, there);
  for (int i = 0; i < 256; i += 16)
    _mm512_store_ps(here + i, own.of(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes + i))));
  for (int i = 0; i < 256; ++i) {
    const bool number = !(Scales::none(_mm512_set1_epi8(static_cast<int8_t>(i))) & 1);
    if (number && !(here[i] == there[i])) return false;
  }
  return true;
}

/// As `spell_scales`, for scales on which `Scales` agrees with it.
template <class Scales>
void spell_in_registers(const ByteScales& scales, int64_t first, int64_t count, float* to) {
  const Scales own(scales);
  for (int64_t i = 0; i < count; i += 16) {
    const auto some = static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xFFFF);
    const __m128i bytes = _mm_maskz_loadu_epi8(some, scales.bytes + first + i);
    const auto none = static_cast<__mmask16>(Scales::none(_mm512_castsi128_si512(bytes)));
    const __m512 values = _mm512_mask_mov_ps(own.of(bytes), none, _mm512_set1_ps(__builtin_nanf("")));
    _mm512_mask_storeu_ps(to + i, some, values);
  }
}

/// The `Scales` that agrees with scales.h on every byte, if there is one; else the conversion for all machines.
inline SpellScales scales_avx512(const ByteScales& scales) {
  if (agrees<Exponents>(scales)) return spell_in_registers<Exponents>;
  if (agrees<Bytes8<false>>(scales)) return spell_in_registers<Bytes8<false>>;
  if (agrees<Bytes8<true>>(scales)) return spell_in_registers<Bytes8<true>>;
  return spell_scales;
}

}  // namespace
}  // namespace qload::cpu
