// Rows of 4-bit codes with values that are no bfloat16 (nf4, fp4), in registers of AVX-512 with BF16. For each 64 codes
// the 16 values are scaled and rounded to bfloat16 once, as `dequantize` to that type rounds them. Then pairs of them
// are looked up and multiplied with inputs of bfloat16, as in pairs.h; a weight of less than 2**-126 counts as 0.
//
// A register has 128 codes, for two tables: the bit above a code selects one. Sums continue from run to run, as the
// values are already scaled.
#pragma once

#include "rows_bf16.h"

namespace qload::cpu {
namespace {

class RoundedValues : public PairedInputs<1> {
 public:
  using S = LanesAvx512;
  static constexpr int kMost = 16, kBlock = 128, kBytes = 64, kSpan = 64;
  static constexpr bool kScales = true;

  explicit RoundedValues(const Meaning& m) {
    alignas(64) float each[16];
    for (int i = 0; i < 16; ++i) each[i] = SixteenPairs<1>::value_of(m, i);
    values_ = S::load(each);
  }

  static bool reads(const Meaning& m) { return m.bits == 4 && !m.zero; }
  static int code(int at, const Meaning& m) { return SixteenPairs<1>::code(at, m); }

  /// Adds columns [begin, end) of R rows times T tokens; `x` are their inputs from `begin` on.
  template <int T, int R>
  void add(const RowsOfCodes& rows, int row, int64_t begin, int64_t end, const uint32_t* x, float* totals) const {
    const Meaning& m = rows.meaning[row];
    if (m.divide || m.factor != 1) return add_scaled<T, R, false>(rows, row, begin, end, x, totals);
    add_scaled<T, R, true>(rows, row, begin, end, x, totals);
  }

 private:
  /// The scaled values of R rows, one run after another.
  template <int R, bool kTimes>
  class Scaled {
   public:
    Scaled(const Meaning* rows, __m512 values, int64_t columns, int64_t begin)
        : rows_(rows), values_(values), columns_(columns), run_(std::min(rows->run, columns)), group_(begin / run_) {
      next_ = (group_ + 1) * run_;
    }

    /// Moves to the run of a column; a column behind the last one is in the last run.
    void go(int64_t column) {
      if (column >= next_ && next_ < columns_) {
        ++group_;
        next_ += run_;
      }
    }

    __m512 of(int row) const {
      const Meaning& m = rows_[row];
      const __m512 scale = S::all(m.scale[group_]);
      if constexpr (kTimes) return S::times(values_, scale);
      const __m512 scaled = m.divide ? S::over(values_, scale) : S::times(values_, scale);
      return S::times(scaled, S::all(m.factor));
    }

   private:
    const Meaning* const rows_;
    const __m512 values_;
    int64_t columns_, run_, group_, next_;
  };

  template <int T, int R, bool kTimes>
  void add_scaled(const RowsOfCodes& rows, int row, int64_t begin, int64_t end, const uint32_t* x,
                  float* totals) const {
    constexpr int kSets = T == 1 ? 4 : T <= 4 ? 2 : 1;  // independent sums, to hide latency
    const __m512i nibbles = _mm512_set1_epi8(15);
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(16), 1);
    Scaled<R, kTimes> scaled(rows.meaning + row, values_, rows.columns, begin);
    __m512 sums[kSets][R][T];
#pragma GCC unroll 4
    for (auto& set : sums)
#pragma GCC unroll 2
      for (auto& of_row : set)
#pragma GCC unroll 16
        for (auto& sum : of_row) sum = S::all(0);
    const auto block = [&](const uint8_t* from, int64_t pitch, int64_t c) {
      __m512 first[R];
      __m512i table[R], even[R], odd[R];
      scaled.go(c);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) first[r] = scaled.of(r);
      scaled.go(c + kSpan);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        table[r] = (__m512i)_mm512_cvtne2ps_pbh(scaled.of(r), first[r]);
        const __m512i words = _mm512_loadu_si512(from + r * pitch);
        even[r] = nibble(words, nibbles, second);
        odd[r] = nibble(_mm512_srli_epi16(words, 4), nibbles, second);
      }
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        __m512i value[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          const __m512i both = part % 2 ? odd[r] : even[r], places = part < 2 ? both : _mm512_srli_epi16(both, 8);
          value[r] = _mm512_permutexvar_epi16(places, table[r]);
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
            __m512& sum = sums[part % kSets][r][t];
            sum = plus_product(sum, x + (part * T + t) * S::kLanes, value[r]);
          }
      }
    };
    const uint8_t* from = rows.codes + row * rows.row_bytes + begin / 2;
    int64_t c = begin;
    for (; c + kBlock <= end; c += kBlock, from += kBytes, x += T * (kBlock / 2)) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) ask_ahead(from + r * rows.row_bytes);
      block(from, rows.row_bytes, c);
    }
    if (c < end) {
      alignas(64) uint8_t last[R][kBytes] = {};
      for (int r = 0; r < R; ++r)
        std::memcpy(last[r], from + r * rows.row_bytes, static_cast<size_t>((end - c + 1) / 2));
      block(last[0], kBytes, c);
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int set = 1; set < kSets; ++set) sums[0][r][t] = S::plus(sums[0][r][t], sums[set][r][t]);
        totals[t * kPanel + r] += S::across(sums[0][r][t]);
      }
  }

  /// The lower code of each byte, and the bit that selects its table.
  static __m512i nibble(__m512i words, __m512i nibbles, __m512i second) {
    return _mm512_ternarylogic_epi32(words, nibbles, second, 0xEA);  // (a and b) or c
  }

  __m512 values_;
};

}  // namespace
}  // namespace qload::cpu
