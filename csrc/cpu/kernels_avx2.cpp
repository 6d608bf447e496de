// The kernels for AVX2 and F16C: registers of 32 bytes.
#include "expand.h"
#include "kernels.h"
#include "lanes_avx2.h"
#include "narrow.h"
#include "network.h"
#include "spread_avx2.h"
#include "vector_avx2.h"

namespace qload::cpu {
namespace {

struct Wide {
  template <class Word>
  static void table(const Meaning& m, const float* all, int64_t group, Word* table) {
    __m256 values[2] = {_mm256_loadu_ps(all), _mm256_loadu_ps(all + 8)};
    for (int half = 0; half < 2; ++half) {
      __m256& of = values[half];
      if (m.zero) of = _mm256_sub_ps(of, _mm256_set1_ps(m.zero[group]));
      const __m256 scale = _mm256_set1_ps(m.scale[group]);
      of = m.divide ? _mm256_div_ps(of, scale) : _mm256_mul_ps(of, scale);
      if (m.factor != 1) of = _mm256_mul_ps(of, _mm256_set1_ps(m.factor));
      if constexpr (sizeof(Word) == 4)
        _mm256_store_ps(reinterpret_cast<float*>(table) + 8 * half, of);
      else
        _mm_store_si128(reinterpret_cast<__m128i*>(table) + half,
                        m.out == Float::kFloat16 ? _mm256_cvtps_ph(of, 0) : bfloat16s(of));
    }
  }

  /// Looks up 32 codes at a time; a table of 16 halves is two tables of bytes.
  static int64_t look_up(const uint8_t* codes, bool high_first, int64_t count, const uint16_t* table,
                         uint16_t* out, bool stream) {
    const __m128i first8 = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    const __m128i last8 = _mm_load_si128(reinterpret_cast<const __m128i*>(table + 8));
    const __m128i byte = _mm_set1_epi16(255);
    const __m128i lower = _mm_packus_epi16(_mm_and_si128(first8, byte), _mm_and_si128(last8, byte));
    const __m128i upper = _mm_packus_epi16(_mm_srli_epi16(first8, 8), _mm_srli_epi16(last8, 8));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m256i low = _mm256_broadcastsi128_si256(lower);
    const __m256i high = _mm256_broadcastsi128_si256(upper);
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
      // Quarters of the 32 codes, 0 and 2 in one register, so that unpacking leaves neighbours together.
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

  static int64_t spread(const uint8_t* codes, int64_t count, uint8_t* nibbles) {
    return spread_64(codes, count, nibbles);
  }

  static int64_t halves(const float* values, int64_t count, uint16_t* out) {
    int64_t done = 0;
    for (; done + 8 <= count; done += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + done), _mm256_cvtps_ph(_mm256_loadu_ps(values + done), 0));
    return done;
  }

  /// Packs 64 words at a time. The pack instructions interleave quarters of the registers by lane; an unpack restores
  /// the order.
  static int64_t narrow(const int32_t* words, int64_t count, int shift, uint8_t* codes, uint32_t& seen) {
    const __m128i by = _mm_cvtsi32_si128(shift);
    const __m256i mask = _mm256_set1_epi32(15), tens = _mm256_set1_epi16(0x1001);  // the second of two codes times 16
    __m256i all = _mm256_setzero_si256();
    const auto pairs = [&](const int32_t* from) {  // 32 words -> 16 bytes, each in 16 bits
      __m256i code[4];
      for (int i = 0; i < 4; ++i) {
        code[i] = _mm256_srl_epi32(Avx2::load(reinterpret_cast<const uint8_t*>(from + 8 * i)), by);
        all = _mm256_or_si256(all, code[i]);
        code[i] = _mm256_and_si256(code[i], mask);
      }
      return _mm256_maddubs_epi16(
          _mm256_packus_epi16(_mm256_packus_epi32(code[0], code[1]), _mm256_packus_epi32(code[2], code[3])), tens);
    };
    int64_t done = 0;
    for (; done + 64 <= count; done += 64) {
      const __m256i bytes = _mm256_packus_epi16(pairs(words + done), pairs(words + done + 32));
      const __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
      auto* const to = reinterpret_cast<__m128i*>(codes + done / 2);
      _mm_storeu_si128(to, _mm_unpacklo_epi16(first, second));
      _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(first, second));
    }
    alignas(32) uint32_t each[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(each), all);
    for (const uint32_t bits : each) seen |= bits;
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
const Kernels kAvx2Kernels{32, run_any, narrow<Wide>, widen, fields, expand<Wide>, Wide::copy, fence,
                             &kAvx2Products, code_dots_avx2, nullptr};

}  // namespace qload::cpu
