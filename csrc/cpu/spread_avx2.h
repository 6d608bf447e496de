// Widening of 3-bit codes to 4 bits, 64 at a time, for AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qload::cpu {
namespace {

/// Widens whole runs of 64 and returns the number of codes. It leaves 16 codes or more, as its loads go beyond a run.
/// Each 3 bytes of eight codes become 4: bytes first, then three shifts as in `spread_eight` (expand.h).
inline int64_t spread_64(const uint8_t* codes, int64_t count, uint8_t* nibbles) {
  const __m256i bytes = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
  const auto apart = [](__m256i eight, int low, int high, int by) {
    return _mm256_or_si256(_mm256_and_si256(eight, _mm256_set1_epi32(low)),
                           _mm256_slli_epi32(_mm256_and_si256(eight, _mm256_set1_epi32(high)), by));
  };
  int64_t done = 0;
  for (; done + 80 <= count; done += 64) {
    const uint8_t* const from = codes + done / 8 * 3;
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 12));
    __m256i eight = _mm256_shuffle_epi8(_mm256_setr_m128i(first, second), bytes);
    eight = apart(eight, 0xFFF, 0xFFF000, 4);
    eight = apart(eight, 0x003F003F, 0x0FC00FC0, 2);
    eight = apart(eight, 0x07070707, 0x38383838, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(nibbles + done / 2), eight);
  }
  return done;
}

}  // namespace
}  // namespace qload::cpu
