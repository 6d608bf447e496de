// Registers of AVX2, FMA and F16C: 8 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../shared/float.h"

namespace qload::cpu {
namespace {

inline __m128i bfloat16s(__m256 values) {  // see bfloat16_of
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i upper = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

struct LanesAvx2 {
  static constexpr int kLanes = 8;
  using Words = __m256i;
  using Floats = __m256;

  static Words load(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static Words words(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
  static Words right(Words words, int bits) { return bits ? _mm256_srli_epi32(words, bits) : words; }
  static Words both(Words a, Words b) { return _mm256_and_si256(a, b); }
  static Words either(Words a, Words b) { return _mm256_or_si256(a, b); }
  static Words minus_bytes(Words a, Words b) { return _mm256_sub_epi8(a, b); }
  static Words four_times(Words bytes) { return _mm256_shuffle_epi8(bytes, words_of(0x00000000)); }
  /// Puts byte `byte` of each lane into its highest byte, above zeros.
  static Words raised(Words words, int byte) {
    return _mm256_shuffle_epi8(words, words_of(0x00808080u | static_cast<uint32_t>(byte) << 24));
  }
  static Floats as_floats(Words words) { return _mm256_castsi256_ps(words); }
  static Floats counted(Words words) { return _mm256_cvtepi32_ps(words); }

  static Floats load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Floats values) { _mm256_storeu_ps(to, values); }
  static Floats all(float value) { return _mm256_set1_ps(value); }
  static Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats plus_product(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }

  static float across(Floats sums) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }

  static Words bytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }

  static Floats read(const void* from, Float type, int64_t at) {
    if (type == Float::kFloat32) return load(static_cast<const float*>(from) + at);
    const auto* const halves = reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + at);
    const __m128i eight = _mm_loadu_si128(halves);
    if (type == Float::kFloat16) return _mm256_cvtph_ps(eight);
    return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
  }

  static void write(Floats values, void* to, Float type, int64_t at) {
    if (type == Float::kFloat32) return store(static_cast<float*>(to) + at, values);
    auto* const halves = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(to) + at);
    _mm_storeu_si128(halves, type == Float::kFloat16 ? _mm256_cvtps_ph(values, 0) : bfloat16s(values));
  }

  static Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Words load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

  /// Copies each of some floats to `lanes` lanes, a power of two.
  struct Spread {
    Words at, some;
    Spread(int count, int lanes) {
      const Words lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
      some = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
      at = _mm256_srl_epi32(lane, _mm_cvtsi32_si128(__builtin_ctz(static_cast<unsigned>(lanes))));
    }
    Floats of(const float* from) const { return _mm256_permutevar8x32_ps(_mm256_maskload_ps(from, some), at); }
  };

  struct Table {
    Floats low, high;
    explicit Table(const float* from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
    Floats nibble(Words words, int bit) const {
      const Words at = right(words, bit), upper = bit < 28 ? _mm256_slli_epi32(words, 28 - bit) : words;
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at), as_floats(upper));
    }
  };

 private:
  /// A shuffle mask: the bytes `places` of each lane; indices from 0x80 on give zeros.
  static Words words_of(uint32_t places) {
    const auto lane = [&](uint32_t first) { return static_cast<int>(places + first * 0x01010101u); };
    const __m128i four = _mm_setr_epi32(lane(0), lane(4), lane(8), lane(12));
    return _mm256_broadcastsi128_si256(four);
  }
};

}  // namespace
}  // namespace qload::cpu
