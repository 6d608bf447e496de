// Products of tokens with decoded rows, by tiles; tiled.h defines the operands.
#pragma once

#include "ahead.h"
#include "rows_bf16.h"
#include "tile_blocks.h"

namespace qload::cpu {
namespace {

/// Transposes 16 registers of 16 words: four rounds, each exchanges the off-diagonal blocks of squares.
inline void turn(__m512i* rows) {
#pragma GCC unroll 4
  for (int half = 8; half; half /= 2) {
    alignas(64) int32_t low[16], high[16];
    for (int i = 0; i < 16; ++i) {
      low[i] = i & half ? 16 + i - half : i;
      high[i] = i & half ? 16 + i : i + half;
    }
    const __m512i of_low = _mm512_load_si512(low), of_high = _mm512_load_si512(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i & half) continue;
      const __m512i upper = rows[i], lower = rows[i + half];
      rows[i] = _mm512_permutex2var_epi32(upper, of_low, lower);
      rows[i + half] = _mm512_permutex2var_epi32(upper, of_high, lower);
    }
  }
}

inline void turn_squares(float* squares, int64_t count) {
  for (float* at = squares; at < squares + count * kTileWords; at += kTileWords) {
    __m512i rows[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) rows[i] = _mm512_load_si512(at + i * kTileRows);
    turn(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(at + i * kTileRows, rows[i]);
  }
}

inline void inputs_of_rows(const uint16_t* x, int64_t pitch, int64_t tokens, int64_t columns, uint32_t* to) {
  for (int64_t c = 0; c < columns; c += kTileInputs, to += kTileWords) {
    const int64_t left = columns - c;
    const __mmask32 some = left < kTileInputs ? (__mmask32{1} << left) - 1 : ~__mmask32{0};
    __m512i rows[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i)
      rows[i] = _mm512_maskz_loadu_epi16(i < tokens ? some : 0, x + (i < tokens ? i * pitch : 0) + c);
    turn(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(to + i * kTileRows, rows[i]);
  }
}

inline bool has_values(const Meaning& m, int64_t columns) {
  return BfloatPairs<1>::reads(m) && !m.group && (m.run % kTileInputs == 0 || m.run >= columns);
}

inline void spell_values(const Meaning& m, const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t count,
                         uint16_t* to) {
  const Bfloats values(m);
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t r = 0; r < rows; ++r, codes += row_bytes, to += kTilePitch)
    for (int64_t c = 0; c < count; c += Bfloats::kBlock) {
      const int64_t left = count - c;
      const __mmask64 some = left < Bfloats::kBlock ? (__mmask64{1} << left) - 1 : ~__mmask64{0};
      const Bfloats::Halves halves = values.of(_mm512_maskz_loadu_epi8(some, codes + c));
      ask_ahead(codes + c, kTileDepth);
      const __m512i first = _mm512_permutex2var_epi64(halves.first, low, halves.second);
      const __m512i second = _mm512_permutex2var_epi64(halves.first, high, halves.second);
      _mm512_storeu_si512(to + c, _mm512_maskz_mov_epi16(static_cast<__mmask32>(some), first));
      _mm512_storeu_si512(to + c + 32, _mm512_maskz_mov_epi16(static_cast<__mmask32>(some >> 32), second));
    }
}

inline bool has_nibbles(const Meaning& m, int64_t columns) {
  return m.bits == 4 && !m.group && !m.place && (m.run % 16 == 0 || m.run >= columns);
}

/// The values of 16 codes, computed in the order of expand.h; the last 8 may be in another group than the first.
class NibbleValues {
 public:
  NibbleValues(const Meaning& m, __m512 values) : m_(m), values_(values), factor_(_mm512_set1_ps(m.factor)) {}

  void of_groups(int64_t first, int64_t second) {
    scale_ = both(m_.scale, first, second);
    if (m_.zero) zero_ = both(m_.zero, first, second);
  }

  __m512 of(__m512i codes) const {
    __m512 value = _mm512_permutexvar_ps(codes, values_);
    if (m_.zero) value = _mm512_sub_ps(value, zero_);
    value = m_.divide ? _mm512_div_ps(value, scale_) : _mm512_mul_ps(value, scale_);
    return m_.factor == 1 ? value : _mm512_mul_ps(value, factor_);
  }

 private:
  static __m512 both(const float* from, int64_t first, int64_t second) {
    return _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(from[first]), _mm512_set1_ps(from[second]));
  }

  const Meaning m_;  // a copy: no store can alias it
  const __m512 values_, factor_;
  __m512 scale_ = _mm512_setzero_ps(), zero_ = _mm512_setzero_ps();
};

/// Decodes `count` codes of a row, from `first` on.
inline void spell_nibbles_of_row(const Meaning& m, __m512 table, __m512i turns, const uint8_t* codes, int64_t first,
                                 int64_t count, uint16_t* to) {
  NibbleValues values(m, table);
  const unsigned low = m.high_first ? 4 : 0, high = 4 - low;
  const int64_t run = m.run;
  int64_t group = first / run, left = (group + 1) * run - first;  // codes left in this group
  bool other = true;
  for (int64_t c = 0; c < count; c += 32) {
    const int64_t here = count - c;
    const bool split = left <= 16 && here > 16;
    if (other || split) values.of_groups(group, group + split);
    const __mmask16 bytes = here < 32 ? static_cast<__mmask16>((1u << ((here + 1) / 2)) - 1) : __mmask16{0xFFFF};
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(bytes, codes + c / 2));
    ask_ahead(codes + c / 2, kTileDepth / 2);
    const __m512 even = values.of(_mm512_srli_epi32(pairs, low)), odd = values.of(_mm512_srli_epi32(pairs, high));
    const __m512i halves = _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    const __mmask32 some = here < 32 ? (__mmask32{1} << here) - 1 : ~__mmask32{0};
    _mm512_storeu_si512(to + c, _mm512_maskz_mov_epi16(some, halves));
    left -= 32;
    other = split || left <= 0;
    for (; left <= 0 && c + 32 < count; left += run) ++group;
  }
}

inline void spell_nibbles(const Meaning* rows, const uint8_t* codes, int64_t row_bytes, int64_t count_of_rows,
                          int64_t first, int64_t count, uint16_t* to) {
  alignas(64) float numbers[16];
  for (int code = 0; code < 16; ++code) numbers[code] = static_cast<float>(code);
  const __m512 table = rows->lookup ? _mm512_loadu_ps(rows->lookup) : _mm512_load_ps(numbers);
  alignas(64) uint16_t order[32];  // interleaves even codes and odd ones
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i turns = _mm512_load_si512(order);
  for (int64_t r = 0; r < count_of_rows; ++r)
    spell_nibbles_of_row(rows[r], table, turns, codes + r * row_bytes, first, count, to + r * kTilePitch);
}

/// totals (outputs, 16 tokens) += scales * sums, of a group, for up to 16 outputs.
inline void add_scaled(const Meaning* rows, int64_t count, int64_t group, const float* sums, float* totals) {
  for (int64_t r = 0; r < kPanel && r < count; ++r, sums += kTileRows, totals += kTileRows) {
    const __m512 scale = _mm512_set1_ps(rows[r].scale[group]), sum = _mm512_load_ps(sums);
    __m512 scaled = rows[r].divide ? _mm512_div_ps(sum, scale) : _mm512_mul_ps(sum, scale);
    if (rows[r].factor != 1) scaled = _mm512_mul_ps(scaled, _mm512_set1_ps(rows[r].factor));
    _mm512_store_ps(totals, _mm512_add_ps(_mm512_load_ps(totals), scaled));
  }
}

/// Adds the products of steps [step, stop) to the sums in tiles.
template <int Several, int Blocks>
void add_steps(const TiledRows& of, int64_t step, int64_t stop) {
  for (; step < stop; ++step) {
    load_first<Several>({of.spelled + step * kTileInputs, 2 * kTilePitch, kPanel * kTilePitch * 2});
    load_second<Blocks>({of.x + step * kTileWords, 64, of.apart * 4});
    add_products<Several, Blocks>();
  }
}

/// totals (panels, blocks, 16, 16) of one or two panels and blocks of tokens += their products.
template <int Several, int Blocks>
void multiply_row_block(const TiledRows& of, float* totals) {
  const auto total = [&](auto i, auto j) {
    return totals + (decltype(i)::value * of.blocks + decltype(j)::value) * kTileWords;
  };
  if (!of.scaled) {
    each_sum<Several, Blocks>([&](auto i, auto j) { Tiles::load<sums_of(i, j)>(total(i, j), 64); });
    add_steps<Several, Blocks>(of, 0, of.steps);
    each_sum<Several, Blocks>([&](auto i, auto j) { Tiles::store<sums_of(i, j)>(total(i, j), 64); });
    return;
  }
  alignas(64) float sums[4][kTileWords];
  const int64_t run = of.scaled[0]->run;
  for (int64_t step = 0, stop; step < of.steps; step = stop) {
    const int64_t group = (of.first + step * kTileInputs) / run, end = tiles_of((group + 1) * run - of.first, kTileInputs);
    stop = end < of.steps ? end : of.steps;
    clear_sums<Several, Blocks>();
    add_steps<Several, Blocks>(of, step, stop);
    each_sum<Several, Blocks>([&](auto i, auto j) { Tiles::store<sums_of(i, j)>(sums[sums_of(i, j)], 64); });
    each_sum<Several, Blocks>([&](auto i, auto j) {
      add_scaled(of.scaled[decltype(i)::value], of.rows - decltype(i)::value * kPanel, group, sums[sums_of(i, j)], total(i, j));
    });
  }
}

inline void multiply_rows_in_tiles(const TiledRows& all, float* totals) {
  for (int64_t block = 0; block < all.blocks; block += 2)
    for (int64_t panel = 0; panel < all.panels; panel += 2) {
      TiledRows some = all;
      some.spelled += panel * kPanel * kTilePitch;
      some.x += block * all.apart;
      some.rows -= panel * kPanel;
      if (some.scaled) some.scaled += panel;
      way_of(all.panels - panel > 1, all.blocks - block > 1, multiply_row_block<2, 2>, multiply_row_block<2, 1>,
             multiply_row_block<1, 2>, multiply_row_block<1, 1>)(some, totals + (panel * all.blocks + block) * kTileWords);
    }
}

}  // namespace
}  // namespace qload::cpu
