// Products of tokens with panels by tiles; tiled.h defines the operands, pairs.h the pairs.
//
// While the next group is multiplied, the scale of this group is applied to its sums, once.
#pragma once

#include "pairs.h"
#include "tile_blocks.h"

namespace qload::cpu {
namespace {

constexpr int64_t kSpelledPanel = kTileDepth / 2 * kPanel;  // words

/// Splits the inputs of rows 0, 4, 1, 5, 2, 6, 3, 7 of each 8 of 32 rows into upper halves and remainders.
inline void inputs_of_panels(const float* row, int64_t rows, int parts, uint32_t* to) {
  alignas(64) uint16_t upper[32];
  for (int i = 0; i < 32; ++i) upper[i] = static_cast<uint16_t>(2 * (i / 8 * 8 + i % 8 / 2 + i % 2 * 4) + 1);
  const __m512i places = _mm512_load_si512(upper), mask = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512i exponent = _mm512_set1_epi32(0x7F800000);
  for (int64_t first = 0; first < rows; first += kTileInputs) {
    __m512 left[2] = {_mm512_loadu_ps(row + first), _mm512_loadu_ps(row + first + 16)};
    for (int part = 0; part < parts; ++part, to += kTileWords) {
      const __m512i halves[2] = {_mm512_castps_si512(left[0]), _mm512_castps_si512(left[1])};
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(halves[0], places, halves[1]));
      for (int i = 0; i < 2; ++i) {
        const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(halves[i], exponent), exponent);
        const __m512 taken = _mm512_castsi512_ps(_mm512_and_si512(halves[i], mask));
        left[i] = _mm512_maskz_sub_ps(finite, left[i], taken);
      }
    }
  }
}

/// Decodes rows [first, first + count) of a panel to pairs.
template <class Codes>
void spell_pairs(const Panels& weight, int64_t panel, int64_t first, int64_t count, uint32_t* to) {
  constexpr int64_t kWords = Codes::kRegisters * kPanel;
  const int64_t groups = weight.rows / weight.run;
  const uint32_t* words = weight.words + (panel * weight.rows + first) / kPairRows * kWords;
  for (int64_t row = first; row < first + count;) {
    const int64_t group = row / weight.run, end = (group + 1) * weight.run;
    const Codes codes(weight, panel * groups + group);
    for (; row < end && row < first + count; row += kPairRows, words += kWords, to += kPairs * kPanel) {
#pragma GCC unroll 2
      for (int part = 0; part < Codes::kRegisters; ++part) ask_ahead(words + part * kPanel);
      __m512i values[kPairs];
      codes.pairs(words, values);
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) _mm512_store_si512(to + pair * kPanel, values[pair]);
    }
  }
}

struct PanelBlock {  // some tokens, one or two panels, and their decoded rows
  const Panels& weight;
  int64_t panel, first, count;  // rows
  const uint32_t *x, *spelled;
  int64_t x_apart;  // words
  float* totals;  // (panels, tokens, 16)
  int64_t totals_apart;
};

/// totals += scales * sums, for all groups of some rows.
template <int Blocks, int Several, int Parts>
void multiply_panel_block(const PanelBlock& of) {
  alignas(64) float sums[4][kTileWords];
  const Panels& weight = of.weight;
  const int64_t groups = weight.rows / weight.run, stop = of.first + of.count;
  Operand x{of.x, 64, of.x_apart * 4}, values{of.spelled, 64, kSpelledPanel * 4};
  const auto next = [](Operand& operand) { operand.at = static_cast<const uint32_t*>(operand.at) + kTileWords; };
  for (int64_t row = of.first; row < stop;) {
    const int64_t group = row / weight.run, end = (group + 1) * weight.run;
    clear_sums<Blocks, Several>();
    for (; row < end && row < stop; row += kTileInputs, next(values)) {
      load_second<Several>(values);
#pragma GCC unroll 2
      for (int part = 0; part < Parts; ++part, next(x)) {
        load_first<Blocks>(x);
        add_products<Blocks, Several>();
      }
    }
    each_sum<Blocks, Several>([&](auto i, auto j) { Tiles::store<sums_of(i, j)>(sums[sums_of(i, j)], 64); });
    each_sum<Blocks, Several>([&](auto i, auto j) {
      const int64_t at = ((of.panel + decltype(j)::value) * groups + group) * kPanel;
      const __m512 scale = LanesAvx512::read(weight.scales, weight.scale_type, at);
      float* const totals = of.totals + decltype(j)::value * of.totals_apart + decltype(i)::value * kTileWords;
#pragma GCC unroll 16
      for (int64_t t = 0; t < kTileWords; t += kPanel)
        _mm512_store_ps(totals + t, _mm512_fmadd_ps(scale, _mm512_load_ps(sums[sums_of(i, j)] + t),
                                                    _mm512_load_ps(totals + t)));
    });
  }
}

template <class Codes, int Parts>
void multiply_panels_in_tiles(const Panels& weight, const PairedTokens& tokens, const Outputs& out, int64_t begin,
                              int64_t end, uint32_t* spelled, float* totals) {
  const int64_t blocks = tiles_of(tokens.count, kTileRows), sums = blocks * kTileWords;
  const int64_t x_apart = weight.rows / 2 * Parts * kTileRows;
  for (int64_t panel = begin; panel < end; panel += kTilePanels) {
    const int64_t here = end - panel < kTilePanels ? end - panel : kTilePanels;
    std::memset(totals, 0, static_cast<size_t>(here * sums) * sizeof(float));
    for (int64_t row = 0; row < weight.rows; row += kTileDepth) {
      const int64_t count = weight.rows - row < kTileDepth ? weight.rows - row : kTileDepth;
      for (int64_t i = 0; i < here; ++i)
        spell_pairs<Codes>(weight, panel + i, row, count, spelled + i * kSpelledPanel);
      for (int64_t block = 0; block < blocks; block += 2)
        for (int64_t i = 0; i < here; i += 2) {
          const PanelBlock both{weight, panel + i, row, count,
                                tokens.x + block * x_apart + row / kTileInputs * Parts * kTileWords,
                                spelled + i * kSpelledPanel, x_apart, totals + i * sums + block * kTileWords, sums};
          way_of(blocks - block > 1, here - i > 1, multiply_panel_block<2, 2, Parts>, multiply_panel_block<2, 1, Parts>,
                 multiply_panel_block<1, 2, Parts>, multiply_panel_block<1, 1, Parts>)(both);
        }
    }
    for (int64_t i = 0; i < here; ++i)
      finish<LanesAvx512>(out, {nullptr, tokens.count, tokens.first}, panel + i, totals + i * sums);
  }
}

}  // namespace
}  // namespace qload::cpu
