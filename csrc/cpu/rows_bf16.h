// Rows of codes in registers of AVX-512 with BF16. A lane has two values of bfloat16, and both products with a pair of
// inputs are added to a float32. Products and sums are as in pairs.h.
#pragma once

#include "halves.h"
#include "rows_avx512.h"

namespace qload::cpu {
namespace {

/// Inputs as `Count` bfloat16.
template <int Count>
struct PairedInputs {
  static constexpr int kInputs = Count, kMost = 8;
  static constexpr bool kScales = false;
  static __m512 plus_product(__m512 sum, const uint32_t* x, __m512i values) {
    return _mm512_dpbf16_ps(sum, (__m512bh)values, (__m512bh)_mm512_loadu_si512(x));
  }
};

/// Whether a value is a bfloat16, and not a subnormal number, since the instruction takes these for 0.
inline bool is_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return !(bits & 0xFFFF) && (bits << 1 == 0 || bits >> 23 & 255);
}

/// 4-bit codes with values in bfloat16: each half of a lane has 4. They are looked up one at a time, by an index of 5
/// bits; the fifth is part of the next code, so the table has each value twice.
template <int Count>
struct SixteenPairs : PairedInputs<Count> {
  using S = LanesAvx512;
  static constexpr int kParts = 4, kBlock = 128, kBytes = 64, kSpan = 8, kLanesOfSpan = 1;
  static constexpr float kFactor = 1;
  __m512i table;

  explicit SixteenPairs(const Meaning& m) {
    alignas(64) uint16_t halves[32];
    for (int i = 0; i < 32; ++i) halves[i] = static_cast<uint16_t>(bits_of(value_of(m, i & 15)) >> 16);
    table = _mm512_load_si512(halves);
  }

  static bool reads(const Meaning& m) {
    if (m.bits != 4 || m.zero) return false;
    for (int code = 0; code < 16; ++code)
      if (!is_bfloat16(value_of(m, code))) return false;
    return true;
  }

  static int code(int at, const Meaning& m) {
    const int part = at / 32;
    return at % 32 * 4 + (m.high_first ? part ^ 1 : part);
  }

  static __m512i load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  __m512i value(__m512i words, int part) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, static_cast<unsigned>(4 * part)), table);
  }

  static float value_of(const Meaning& m, int code) { return m.lookup ? m.lookup[code] : static_cast<float>(code); }
};

/// 8-bit codes with values in bfloat16, in the halves of `Bfloats`.
template <int Count>
struct BfloatPairs : PairedInputs<Count> {
  using S = LanesAvx512;
  static constexpr int kParts = 2, kBlock = 64, kBytes = 64, kSpan = 16, kLanesOfSpan = 4;
  static constexpr float kFactor = 1;
  Bfloats values;

  explicit BfloatPairs(const Meaning& m) : values(m) {}

  static bool reads(const Meaning& m) {
    if (m.zero || !Bfloats::reads(m)) return false;
    for (int code = 0; code < 256; ++code)
      if (!is_bfloat16(m.lookup ? m.lookup[code] : static_cast<float>(code))) return false;
    return true;
  }

  static int code(int at, const Meaning&) { return at % 32 / 8 * 16 + at / 32 * 8 + at % 8; }

  Bfloats::Halves load(const uint8_t* from) const { return values.load(from); }
  static __m512i value(const Bfloats::Halves& halves, int part) { return part ? halves.second : halves.first; }
};

}  // namespace
}  // namespace qload::cpu
