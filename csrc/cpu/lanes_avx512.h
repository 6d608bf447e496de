// Registers of AVX-512: 16 floats. See lanes_avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../shared/float.h"

namespace qload::cpu {
namespace {

inline __m256i bfloat16s(__m512 values) {  // see bfloat16_of
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i upper = _mm512_srli_epi32(rounded, 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(upper, nan, _mm512_set1_epi32(0x7FC0)));
}

struct LanesAvx512 {
  static constexpr int kLanes = 16;
  using Words = __m512i;
  using Floats = __m512;

  static Words load(const uint32_t* from) { return _mm512_loadu_si512(from); }
  static Words words(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
  static Words right(Words words, int bits) {
    return bits ? _mm512_srli_epi32(words, static_cast<unsigned>(bits)) : words;
  }
  static Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
  static Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
  static Words minus_bytes(Words a, Words b) { return _mm512_sub_epi8(a, b); }
  static Words four_times(Words bytes) { return _mm512_shuffle_epi8(bytes, words_of(0x00000000)); }
  static Words raised(Words words, int byte) {
    return _mm512_shuffle_epi8(words, words_of(0x00808080u | static_cast<uint32_t>(byte) << 24));
  }
  static Floats as_floats(Words words) { return _mm512_castsi512_ps(words); }
  static Floats counted(Words words) { return _mm512_cvtepi32_ps(words); }

  static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
  static Floats all(float value) { return _mm512_set1_ps(value); }
  static Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats plus_product(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }

  static float across(Floats sums) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }

  static Words bytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static Floats read(const void* from, Float type, int64_t at) {
    if (type == Float::kFloat32) return load(static_cast<const float*>(from) + at);
    const auto* const halves = reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + at);
    const __m256i sixteen = _mm256_loadu_si256(halves);
    if (type == Float::kFloat16) return _mm512_cvtph_ps(sixteen);
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(sixteen), 16));
  }

  static void write(Floats values, void* to, Float type, int64_t at) {
    if (type == Float::kFloat32) return store(static_cast<float*>(to) + at, values);
    auto* const halves = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(to) + at);
    _mm256_storeu_si256(halves, type == Float::kFloat16 ? _mm512_cvtps_ph(values, 0) : bfloat16s(values));
  }

  static Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Words load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }

  /// Copies each of some floats to `lanes` lanes, a power of two.
  struct Spread {
    Words at;
    __mmask16 some;
    Spread(int count, int lanes) : some(static_cast<__mmask16>((1u << count) - 1)) {
      const Words lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      at = _mm512_srli_epi32(lane, static_cast<unsigned>(__builtin_ctz(static_cast<unsigned>(lanes))));
    }
    Floats of(const float* from) const { return _mm512_permutexvar_ps(at, _mm512_maskz_loadu_ps(some, from)); }
  };

  struct Table {
    Floats values;
    explicit Table(const float* from) : values(_mm512_loadu_ps(from)) {}
    Floats nibble(Words words, int bit) const { return _mm512_permutexvar_ps(right(words, bit), values); }
  };

 private:
  static Words words_of(uint32_t places) {
    const auto lane = [&](uint32_t first) { return static_cast<int>(places + first * 0x01010101u); };
    return _mm512_broadcast_i32x4(_mm_setr_epi32(lane(0), lane(4), lane(8), lane(12)));
  }
};

}  // namespace
}  // namespace qload::cpu
