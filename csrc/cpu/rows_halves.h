// Rows of bfloat16: lanes are pairs of columns, and one instruction adds both products to a float32.
#pragma once

#include "dots_avx512.h"
#include "rows_spelled.h"

namespace qload::cpu {
namespace {

struct HalfDots {
  using Element = uint16_t;
  using Register = __m512bh;
  static constexpr int64_t kColumns = 32;
  static Register load(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static __m512 plus_product(__m512 sum, Register x, Register row) { return _mm512_dpbf16_ps(sum, x, row); }
};

/// Converts 32 values to bfloat16, each rounded once to nearest even; magnitudes below 2**-126 become 0.
struct SpelledHalves {
  using Element = uint16_t;
  static void put(uint16_t* to, __m512 first, __m512 second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
};

/// As `spell_floats`, or rounded to bfloat16.
inline bool spell_either(const RowsOfCodes& rows, int64_t begin, int64_t end, Float type, void* tile, int64_t pitch) {
  if (type == Float::kFloat32) return spell_floats(rows, begin, end, type, tile, pitch);
  return spell_rows<SpelledHalves>(rows, begin, end, static_cast<uint16_t*>(tile), pitch);
}

}  // namespace
}  // namespace qload::cpu
