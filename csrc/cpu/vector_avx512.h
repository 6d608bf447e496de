// A register of 64 bytes. VBMI shuffles all of its bytes at once. See vector_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vector_scalar.h"

namespace qload::cpu {
namespace {

struct Avx512 {
  using T = __m512i;
  static constexpr int kPositions = 9;

  static T load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static void prefetch(const uint8_t* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0); }
  static void store(uint8_t* to, T value) { _mm512_storeu_si512(to, value); }
  static void stream(uint8_t* to, T value) { _mm512_stream_si512(reinterpret_cast<T*>(to), value); }

  template <int Position>
  static void exchange(T a, T b, T& low, T& high) {
    if constexpr (Position < 6) {
      constexpr int distance = 1 << Position;
      const T kept = _mm512_set1_epi64(static_cast<int64_t>(below(Position)));
      // 0xE4 selects, in the order (a, b, mask): b for a mask bit of 0, a for 1.
      low = _mm512_ternarylogic_epi64(a, _mm512_slli_epi64(b, distance), kept, kSelect);
      high = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, distance), b, kept, kSelect);
    } else if constexpr (Position == 6) {
      low = _mm512_unpacklo_epi64(a, b);
      high = _mm512_unpackhi_epi64(a, b);
    } else if constexpr (Position == 7) {
      low = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), b);
      high = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), b);
    } else {
      low = _mm512_shuffle_i64x2(a, b, 0x44);
      high = _mm512_shuffle_i64x2(a, b, 0xEE);
    }
  }

  static T swap(T value, int distance, uint64_t mask) {
    const __m128i by = _mm_cvtsi32_si128(distance);
    const T moved = _mm512_and_si512(_mm512_xor_si512(_mm512_srl_epi64(value, by), value),
                                     _mm512_set1_epi64(static_cast<int64_t>(mask)));
    return _mm512_xor_si512(_mm512_xor_si512(value, moved), _mm512_sll_epi64(moved, by));
  }

  struct Table {
    T source;
    explicit Table(const Shuffle& shuffle) : source(load(shuffle.source)) {}
    T apply(T value) const { return _mm512_permutexvar_epi8(source, value); }
  };

 private:
  static constexpr int kSelect = 0xE4 & 0xFF;
};

}  // namespace
}  // namespace qload::cpu
