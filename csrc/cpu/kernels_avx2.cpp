// The kernels for AVX2 and F16C: registers of 32 bytes.
#include "expand.h"
#include "kernels.h"
#include "narrow.h"
#include "network.h"
#include "vector_avx2.h"

namespace qload::cpu {
namespace {

struct Wide {
  /// 32 codes at a time, tables of 16 halves as two of bytes.
  static int64_t look_up(const uint8_t* codes, bool high_first, int64_t count, const uint16_t* table,
                         uint16_t* out, bool stream) {
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < 16; ++i) bytes[0][i] = static_cast<uint8_t>(table[i]), bytes[1][i] = table[i] >> 8;
    const __m128i nibble = _mm_set1_epi8(15);
    const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[0])));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[1])));
    stream = stream && reinterpret_cast<uintptr_t>(out) % 32 == 0;
    int64_t done = 0;
    for (; done + 32 <= count; done += 32) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + done / 2));
      __m128i first = _mm_and_si128(pairs, nibble), second = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
      if (high_first) {
        const __m128i kept = first;
        first = second;
        second = kept;
      }
      // Quarters of the 32 codes: 0 and 2 in one register, so that unpacking leaves neighbours together.
      const __m256i all = _mm256_setr_m128i(_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second));
      const __m256i ordered = _mm256_permute4x64_epi64(all, 0xD8);
      const __m256i lows = _mm256_shuffle_epi8(low, ordered), highs = _mm256_shuffle_epi8(high, ordered);
      put(out + done, _mm256_unpacklo_epi8(lows, highs), stream);
      put(out + done + 16, _mm256_unpackhi_epi8(lows, highs), stream);
    }
    return done;
  }

  static int64_t look_up(const uint8_t* codes, bool high_first, int64_t count, const uint32_t* table,
                         uint32_t* out, bool stream) {
    const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(table));
    const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(table + 8));
    const __m256i places = high_first ? _mm256_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24)
                                      : _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    stream = stream && reinterpret_cast<uintptr_t>(out) % 32 == 0;
    int64_t done = 0;
    for (; done + 8 <= count; done += 8) {
      int32_t word;
      std::memcpy(&word, codes + done / 2, 4);
      const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), places);
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      put(out + done,
          _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(_mm256_permutevar8x32_epi32(low, code)),
                                               _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(high, code)), upper)),
          stream);
    }
    return done;
  }

  static int64_t halves(const float* values, int64_t count, uint16_t* out) {
    int64_t done = 0;
    for (; done + 8 <= count; done += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + done), _mm256_cvtps_ph(_mm256_loadu_ps(values + done), 0));
    return done;
  }

  static void copy(const uint8_t* from, uint8_t* to, int64_t bytes, bool stream) {
    int64_t done = 0;
    if (stream && reinterpret_cast<uintptr_t>(to) % 32 == 0)
      for (; done + 32 <= bytes; done += 32) Avx2::stream(to + done, Avx2::load(from + done));
    std::memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
  }

 private:
  static void put(void* out, __m256i value, bool stream) {
    if (stream)
      Avx2::stream(static_cast<uint8_t*>(out), value);
    else
      Avx2::store(static_cast<uint8_t*>(out), value);
  }
};

void run_any(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream) {
  if (plan.width == 32) return run<Avx2>(plan, from, to, begin, end, stream);
  if (plan.width == 8) return run<Scalar8>(plan, from, to, begin, end, stream);
  run<Scalar4>(plan, from, to, begin, end, stream);
}

void fence() { _mm_sfence(); }

}  // namespace

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels{32, run_any, narrow, widen, fields, expand<Wide>, Wide::copy, fence};

}  // namespace qload::cpu
