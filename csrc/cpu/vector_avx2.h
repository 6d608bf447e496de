// A register of 32 bytes, in two lanes; AVX2's shuffles stay inside of one. See vector_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vector_scalar.h"

namespace qload::cpu {
namespace {

struct Avx2 {
  using T = __m256i;
  static constexpr int kPositions = 8;

  static T load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const T*>(from)); }
  static void prefetch(const uint8_t* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0); }
  static void store(uint8_t* to, T value) { _mm256_storeu_si256(reinterpret_cast<T*>(to), value); }
  static void stream(uint8_t* to, T value) { _mm256_stream_si256(reinterpret_cast<T*>(to), value); }

  template <int Position>
  static void exchange(T a, T b, T& low, T& high) {
    constexpr int distance = 1 << Position;
    if constexpr (Position < 3) {  // two differences instead of four halves
      const T kept = _mm256_set1_epi64x(static_cast<int64_t>(below(Position)));
      const T apart = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi64(a, distance), b), kept);
      low = _mm256_xor_si256(a, _mm256_slli_epi64(apart, distance));
      high = _mm256_xor_si256(b, apart);
    } else if constexpr (Position == 3) {
      const T odd = _mm256_set1_epi16(static_cast<int16_t>(0xFF00));
      low = _mm256_blendv_epi8(a, _mm256_slli_epi64(b, distance), odd);
      high = _mm256_blendv_epi8(_mm256_srli_epi64(a, distance), b, odd);
    } else if constexpr (Position == 4) {
      low = _mm256_blend_epi16(a, _mm256_slli_epi64(b, distance), 0xAA);
      high = _mm256_blend_epi16(_mm256_srli_epi64(a, distance), b, 0xAA);
    } else if constexpr (Position == 5) {
      low = _mm256_blend_epi32(a, _mm256_slli_epi64(b, distance), 0xAA);
      high = _mm256_blend_epi32(_mm256_srli_epi64(a, distance), b, 0xAA);
    } else if constexpr (Position == 6) {
      low = _mm256_unpacklo_epi64(a, b);
      high = _mm256_unpackhi_epi64(a, b);
    } else {
      low = _mm256_permute2x128_si256(a, b, 0x20);
      high = _mm256_permute2x128_si256(a, b, 0x31);
    }
  }

  static T swap(T value, int distance, uint64_t mask) {
    const __m128i by = _mm_cvtsi32_si128(distance);
    const T moved = _mm256_and_si256(_mm256_xor_si256(_mm256_srl_epi64(value, by), value),
                                     _mm256_set1_epi64x(static_cast<int64_t>(mask)));
    return _mm256_xor_si256(_mm256_xor_si256(value, moved), _mm256_sll_epi64(moved, by));
  }

  struct Table {
    T first, second;
    bool crosses;
    explicit Table(const Shuffle& shuffle)
        : first(load(shuffle.first)), second(load(shuffle.second)), crosses(shuffle.crosses) {}
    T apply(T value) const {
      if (crosses) value = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(value, first), 0xD8);
      return _mm256_shuffle_epi8(value, second);
    }
  };
};

}  // namespace
}  // namespace qload::cpu
