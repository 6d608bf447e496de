// Rows of codes in registers of AVX-512 with VBMI.
#pragma once

#include "lanes_avx512.h"
#include "rows_few.h"

namespace qload::cpu {
namespace {

/// 8-bit codes with values in bfloat16 (FP8, integers): both bytes of a value are looked up, each in two tables of 128
/// bytes, then combined. The first 8 and the last 8 of 16 codes become a register of halves each; their even and odd
/// halves become floats.
struct Bfloats : FloatInputs<LanesAvx512> {
  using S = LanesAvx512;
  static constexpr int kParts = 4, kBlock = 64, kBytes = 64, kSpan = 16, kLanesOfSpan = 4;
  static constexpr float kFactor = 1;
  struct Halves {
    __m512i first, second;  // of each 16 codes
  };
  __m512i low[4], high[4];

  explicit Bfloats(const Meaning& m) {
    alignas(64) uint8_t lower[256], upper[256];
    for (int code = 0; code < 256; code += S::kLanes) {
      const __m512i bits = bits_from(m, code);
      _mm_store_si128(reinterpret_cast<__m128i*>(lower + code), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16)));
      _mm_store_si128(reinterpret_cast<__m128i*>(upper + code), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24)));
    }
    for (int i = 0; i < 4; ++i) {
      low[i] = _mm512_load_si512(lower + 64 * i);
      high[i] = _mm512_load_si512(upper + 64 * i);
    }
  }

  static bool reads(const Meaning& m) {
    if (m.bits != 8) return false;
    __m512i rest = _mm512_setzero_si512();
    for (int code = 0; code < 256; code += S::kLanes) rest = S::either(rest, bits_from(m, code));
    return !_mm512_test_epi32_mask(rest, S::words(0xFFFF));
  }

  static int code(int at, const Meaning&) {
    const int part = at / S::kLanes, lane = at % S::kLanes;
    return lane / 4 * 16 + part / 2 * 8 + lane % 4 * 2 + part % 2;
  }

  Halves load(const uint8_t* from) const { return of(_mm512_loadu_si512(from)); }

  Halves of(__m512i codes) const {
    const __mmask64 last = _mm512_movepi8_mask(codes);
    const __m512i lower = byte(low, codes, last), upper = byte(high, codes, last);
    return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
  }

  S::Floats value(const Halves& halves, int part) const {
    const __m512i both = part < 2 ? halves.first : halves.second;
    return _mm512_castsi512_ps(part % 2 ? _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))
                                        : _mm512_slli_epi32(both, 16));
  }

 private:
  /// Decodes 16 codes to floats.
  static __m512i bits_from(const Meaning& m, int code) {
    if (m.lookup) return _mm512_loadu_si512(m.lookup + code);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(code))));
  }

  static __m512i byte(const __m512i (&table)[4], __m512i codes, __mmask64 last) {
    const __m512i first = _mm512_permutex2var_epi8(table[0], codes, table[1]);
    return _mm512_mask_mov_epi8(first, last, _mm512_permutex2var_epi8(table[2], codes, table[3]));
  }
};

inline bool few_floats(const Meaning& m, Float, FewRows& way) {
  return takes<Sixteen<LanesAvx512>>(m, way) || takes<Bfloats>(m, way);
}

}  // namespace
}  // namespace qload::cpu
