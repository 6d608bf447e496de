// Rows of codes of 4 and 8 bits, decoded in registers of AVX-512, with scales of 16 codes or more. The result is in memory
// that stays in the cache, and is multiplied there (rows_many.h).
//
//   tile[r, c] = (value(code[r, c]) - zero) * scale * factor      the formula of expand.h, in the same order
//
// For 4 bits, the 16 values are scaled for each 16 codes, and the codes are looked up in the result. For 8 bits, values are
// bfloat16; their bytes are looked up, and then scaled. `To` converts 32 values for the tile.
#pragma once

#include <algorithm>

#include "rows_avx512.h"

namespace qload::cpu {
namespace {

constexpr int64_t kSpelledRun = 16;    // codes in a register
constexpr int64_t kSpelledAtOnce = 64;  // a tile has a multiple of these

struct SpelledFloats {
  using Element = float;
  static void put(float* to, __m512 first, __m512 second) {
    _mm512_storeu_ps(to, first);
    _mm512_storeu_ps(to + kSpelledRun, second);
  }
};

/// The zero points and scales of a row, 16 columns after another. `kTimes`: a product with the scale is the only
/// operation.
template <bool kTimes>
class SpelledScales {
 public:
  SpelledScales(const Meaning& m, int64_t columns, int64_t begin) : m_(m), columns_(columns) {
    const int64_t run = std::min(m.run, columns);
    group_ = begin / run;
    next_ = (group_ + 1) * run;
  }

  /// Scales the values of the columns from `column` on; columns behind the last one have the scale of the last run.
  __m512 of(int64_t column, __m512 values) {
    if (column >= next_ && next_ < columns_) {
      ++group_;
      next_ += m_.run;
    }
    const __m512 scale = _mm512_set1_ps(m_.scale[group_]);
    if constexpr (kTimes) return _mm512_mul_ps(values, scale);
    if (m_.zero) values = _mm512_sub_ps(values, _mm512_set1_ps(m_.zero[group_]));
    values = m_.divide ? _mm512_div_ps(values, scale) : _mm512_mul_ps(values, scale);
    return m_.factor == 1 ? values : _mm512_mul_ps(values, _mm512_set1_ps(m_.factor));
  }

 private:
  const Meaning& m_;
  int64_t columns_, group_, next_;
};

/// The first `count` bytes, zero-padded; bytes behind them are not read.
inline __m512i some_bytes(const uint8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi8(count < 64 ? (1ull << count) - 1 : ~0ull, from);
}

/// Decodes codes of 4 bits, 64 at a time.
struct SpelledNibbles {
  __m512 values;
  __m512i last = _mm512_set1_epi64(0), place;  // shifts of the second code of a byte, and of the first

  explicit SpelledNibbles(const Meaning& m) {
    alignas(64) float each[16];
    for (int i = 0; i < 16; ++i) each[i] = m.lookup ? m.lookup[i] : static_cast<float>(i);
    values = _mm512_load_ps(each);
    last = _mm512_set1_epi64(m.high_first ? 4 : 0);
    place = _mm512_set1_epi64(m.high_first ? 32 : 28);
  }

  static bool reads(const Meaning& m) { return m.bits == 4; }

  /// `left`: codes left from `codes` on; `to` receives values of 16 columns each, in order.
  template <class Scales>
  void spell(const uint8_t* codes, int64_t left, int64_t column, Scales& scales, __m512 (&to)[4]) const {
    const __m256i bytes = _mm512_castsi512_si256(some_bytes(codes, (std::min(left, kSpelledAtOnce) + 1) / 2));
    const __m128i halves[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m128i eight = i % 2 ? _mm_unpackhi_epi64(halves[i / 2], halves[i / 2]) : halves[i / 2];
      const __m512i each = _mm512_cvtepu8_epi64(eight);
      const __m512i index = _mm512_or_si512(_mm512_srlv_epi64(each, last), _mm512_sllv_epi64(each, place));
      to[i] = _mm512_permutexvar_ps(index, scales.of(column + i * kSpelledRun, values));
    }
  }
};

/// Decodes codes of 8 bits with values in bfloat16, 64 at a time.
struct SpelledBytes {
  Bfloats values;

  explicit SpelledBytes(const Meaning& m) : values(m) {}
  static bool reads(const Meaning& m) { return Bfloats::reads(m); }

  template <class Scales>
  void spell(const uint8_t* codes, int64_t left, int64_t column, Scales& scales, __m512 (&to)[4]) const {
    const Bfloats::Halves halves = values.of(some_bytes(codes, left));
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i both[2] = {_mm512_permutex2var_epi64(halves.first, first, halves.second),
                             _mm512_permutex2var_epi64(halves.first, second, halves.second)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i sixteen =
          i % 2 ? _mm512_extracti64x4_epi64(both[i / 2], 1) : _mm512_castsi512_si256(both[i / 2]);
      const __m512 each = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(sixteen), 16));
      to[i] = scales.of(column + i * kSpelledRun, each);
    }
  }
};

template <class To, class Codes, bool kTimes>
void spell_as(const RowsOfCodes& rows, int64_t begin, int64_t end, typename To::Element* tile, int64_t pitch) {
  const Codes codes(rows.meaning[0]);
  const int bits = rows.meaning[0].bits;
  for (int r = 0; r < rows.count; ++r) {
    SpelledScales<kTimes> scales(rows.meaning[r], rows.columns, begin);
    const uint8_t* from = rows.codes + r * rows.row_bytes + begin * bits / 8;
    typename To::Element* to = tile + r * pitch;
    for (int64_t c = begin; c < end; c += kSpelledAtOnce, from += kSpelledAtOnce * bits / 8, to += kSpelledAtOnce) {
      __m512 each[4];
      codes.spell(from, end - c, c, scales, each);
      if (end - c < kSpelledAtOnce)
        for (int i = 0; i < 4; ++i) {
          const int64_t left = std::clamp<int64_t>(end - c - i * kSpelledRun, 0, kSpelledRun);
          each[i] = _mm512_maskz_mov_ps(static_cast<__mmask16>((1u << left) - 1), each[i]);
        }
      To::put(to, each[0], each[1]);
      To::put(to + 2 * kSpelledRun, each[2], each[3]);
    }
  }
}

/// Decodes columns [begin, end) of some rows, `pitch` apart, with zeros up to a multiple of `kSpelledAtOnce`; `begin` is
/// such a multiple. Returns false and writes nothing if it does not support the codes.
template <class To>
bool spell_rows(const RowsOfCodes& rows, int64_t begin, int64_t end, typename To::Element* tile, int64_t pitch) {
  const Meaning& m = rows.meaning[0];
  if (m.group || m.place || (m.run % kSpelledRun && m.run < rows.columns)) return false;
  const bool times = !m.zero && !m.divide && m.factor == 1;
  if (SpelledNibbles::reads(m))
    (times ? spell_as<To, SpelledNibbles, true> : spell_as<To, SpelledNibbles, false>)(rows, begin, end, tile, pitch);
  else if (SpelledBytes::reads(m))
    (times ? spell_as<To, SpelledBytes, true> : spell_as<To, SpelledBytes, false>)(rows, begin, end, tile, pitch);
  else
    return false;
  return true;
}

inline bool spell_floats(const RowsOfCodes& rows, int64_t begin, int64_t end, Float type, void* tile, int64_t pitch) {
  return type == Float::kFloat32 && spell_rows<SpelledFloats>(rows, begin, end, static_cast<float*>(tile), pitch);
}

}  // namespace
}  // namespace qload::cpu
