// The kernels for AVX-512 with VBMI: registers of 64 bytes, tables of 32 halves.
#include "expand.h"
#include "kernels.h"
#include "lanes_avx512.h"
#include "narrow.h"
#include "network.h"
#include "spread_avx2.h"
#include "vector_avx2.h"
#include "vector_avx512.h"

namespace qload::cpu {
namespace {

struct Wide {
  /// Computes all 16 values in one register, so that no load waits for a store.
  template <class Word>
  static void table(const Meaning& m, const float* all, int64_t group, Word* table) {
    __m512 values = _mm512_loadu_ps(all);
    if (m.zero) values = _mm512_sub_ps(values, _mm512_set1_ps(m.zero[group]));
    const __m512 scale = _mm512_set1_ps(m.scale[group]);
    values = m.divide ? _mm512_div_ps(values, scale) : _mm512_mul_ps(values, scale);
    if (m.factor != 1) values = _mm512_mul_ps(values, _mm512_set1_ps(m.factor));
    if constexpr (sizeof(Word) == 4)
      _mm512_store_ps(table, values);
    else
      _mm256_store_si256(reinterpret_cast<__m256i*>(table),
                         m.out == Float::kFloat16 ? _mm512_cvtps_ph(values, 0) : bfloat16s(values));
  }

  /// Looks up 32 codes at a time: two shifted copies of a byte are the indices of its codes. Only the low five bits of
  /// an index count, and the table is stored twice.
  static int64_t look_up(const uint8_t* codes, bool high_first, int64_t count, const uint16_t* table,
                         uint16_t* out, bool stream) {
    const __m512i values = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)));
    stream = stream && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    int64_t done = 0;
    for (; done + 32 <= count; done += 32) {
      const __m512i pairs =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + done / 2)));
      const __m512i index = high_first ? _mm512_or_si512(_mm512_srli_epi32(pairs, 4), _mm512_slli_epi32(pairs, 16))
                                       : _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
      put(out + done, _mm512_permutexvar_epi16(index, values), stream);
    }
    return done;
  }

  static int64_t look_up(const uint8_t* codes, bool high_first, int64_t count, const uint32_t* table,
                         uint32_t* out, bool stream) {
    const __m512i values = _mm512_load_si512(table);
    stream = stream && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    int64_t done = 0;
    for (; done + 16 <= count; done += 16) {
      const __m512i pairs =
          _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + done / 2)));
      const __m512i index = high_first ? _mm512_or_si512(_mm512_srli_epi64(pairs, 4), _mm512_slli_epi64(pairs, 32))
                                       : _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
      put(out + done, _mm512_permutexvar_epi32(index, values), stream);
    }
    return done;
  }

  static int64_t spread(const uint8_t* codes, int64_t count, uint8_t* nibbles) {
    return spread_64(codes, count, nibbles);
  }

  static int64_t halves(const float* values, int64_t count, uint16_t* out) {
    int64_t done = 0;
    for (; done + 16 <= count; done += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + done), _mm512_cvtps_ph(_mm512_loadu_ps(values + done), 0));
    return done;
  }

  static int64_t narrow(const int32_t*, int64_t, int, uint8_t*, uint32_t&) { return 0; }
  static void copy(const uint8_t* from, uint8_t* to, int64_t bytes, bool stream) {
    int64_t done = 0;
    if (stream && reinterpret_cast<uintptr_t>(to) % 64 == 0)
      for (; done + 64 <= bytes; done += 64) Avx512::stream(to + done, Avx512::load(from + done));
    std::memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
  }

 private:
  static void put(void* out, __m512i value, bool stream) {
    if (stream)
      Avx512::stream(static_cast<uint8_t*>(out), value);
    else
      Avx512::store(static_cast<uint8_t*>(out), value);
  }
};

void run_any(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream) {
  if (plan.width == 64) return run<Avx512>(plan, from, to, begin, end, stream);
  if (plan.width == 32) return run<Avx2>(plan, from, to, begin, end, stream);
  if (plan.width == 8) return run<Scalar8>(plan, from, to, begin, end, stream);
  run<Scalar4>(plan, from, to, begin, end, stream);
}

void fence() { _mm_sfence(); }

}  // namespace

extern const Kernels kAvx512Kernels, kAvx512VnniKernels, kAvx512Bf16Kernels;
const Kernels kAvx512Kernels{64, run_any, narrow<Wide>, widen, fields, expand<Wide>, Wide::copy, fence,
                             &kAvx512Products, code_dots_avx512, nullptr};
const Kernels kAvx512VnniKernels{64, run_any, narrow<Wide>, widen, fields, expand<Wide>, Wide::copy, fence,
                                 &kVnniProducts, code_dots_vnni, nullptr};
const Kernels kAvx512Bf16Kernels{64, run_any, narrow<Wide>, widen, fields, expand<Wide>, Wide::copy, fence,
                                 &kBf16Products, code_dots_vnni, nullptr};
#ifdef QLOAD_AMX
extern const Kernels kAvx512AmxKernels;
const Kernels kAvx512AmxKernels{64, run_any, narrow<Wide>, widen, fields, expand<Wide>, Wide::copy, fence,
                                &kBf16Products, code_dots_vnni, &kAmxProducts};
#endif

}  // namespace qload::cpu
