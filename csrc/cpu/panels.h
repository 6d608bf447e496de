// Products with panels; product.h has the formula and the order of sums.
//
// A panel has 16 columns. Of 16 consecutive words, one row of codes after another is decoded to floats without its zero
// points, all exactly.
//
//   few tokens    these floats stay in registers, and a panel's words are read once
//   more          some panels are decoded, `kDepth` rows at a time, into memory that stays in the cache,
//                 and multiplied there by `kBlock` tokens at a time
//
// `S` has the registers of an instruction set. The limit is memory for one token, arithmetic from four on.
#pragma once

#include <cstdint>
#include <cstring>

#include "ahead.h"
#include "halves.h"
#include "kernels.h"
#include "offsets.h"

namespace qload::cpu {
namespace {

constexpr int kMostFew = kBlock;   // tokens with sums that fit the registers
constexpr int64_t kDepth = 128;    // rows decoded at once
constexpr int64_t kTile = (kDepth + 1) * kPanel;  // floats: of the rows, and the scales

template <class S>
constexpr int kParts = kPanel / S::kLanes;  // registers of a row

/// The zero points of a part of a group, one for each lane.
template <class S>
typename S::Words zeros_of(const Panels& weight, int64_t group, int part) {
  if (!weight.zeros) return S::words(weight.zero);
  return S::bytes(weight.zeros + group * kPanel + part * S::kLanes);
}

/// The codes of a group of a panel, as floats without their zero points: the last bits of the float 2**23 + code are
/// the code.
template <class S, int kBits>
struct Wide {
  static constexpr int kRows = 32 / kBits;  // of a word
  static constexpr float kFactor = 1;   // factor of results of `value`
  using Words = typename S::Words;
  using Floats = typename S::Floats;
  using Line = Words;

  Words mask = S::words((1 << kBits) - 1), magic = S::words(0x4B000000);
  Floats zero[kParts<S>];

  Wide(const Panels& weight, int64_t group) {
    for (int part = 0; part < kParts<S>; ++part)
      zero[part] = S::as_floats(S::either(zeros_of<S>(weight, group, part), magic));
  }

  Line line(Words word, int) const { return word; }

  Floats value(const Line& line, int row, int part) const {
    Words code = S::right(line, kBits * row);
    if (row < kRows - 1) code = S::both(code, mask);
    return S::minus(S::as_floats(S::either(code, magic)), zero[part]);
  }
};

/// The same for codes of 4 bits of a narrow weight: four at once become bytes and lose their zero points. Each is a float
/// as the highest byte of a lane.
template <class S>
struct Nibbles {
  static constexpr int kRows = 8;
  static constexpr float kFactor = 0x1p24f;
  using Words = typename S::Words;
  using Floats = typename S::Floats;
  struct Line {
    Words even, odd;
  };

  Words mask = S::words(0x0F0F0F0F);
  Words zero[kParts<S>];

  Nibbles(const Panels& weight, int64_t group) {
    for (int part = 0; part < kParts<S>; ++part) zero[part] = S::four_times(zeros_of<S>(weight, group, part));
  }

  Line line(Words word, int part) const {
    return {S::minus_bytes(S::both(word, mask), zero[part]),
            S::minus_bytes(S::both(S::right(word, 4), mask), zero[part])};
  }

  Floats value(const Line& line, int row, int) const {
    return S::counted(S::raised(row % 2 ? line.odd : line.even, row / 2));
  }
};

/// Multiplies T tokens with a panel; `totals`: T x 16.
template <class S, class Codes, int T>
void multiply_few(const Panels& weight, int64_t panel, const float* x, float* totals) {
  using Floats = typename S::Floats;
  constexpr int kSets = T == 1 ? 4 / kParts<S> : 1;  // independent sums, to hide latency
  const int64_t groups = weight.rows / weight.run, lines = weight.run / Codes::kRows;
  const uint32_t* words = weight.words + panel * (weight.rows / Codes::kRows) * kPanel;
  Floats total[T][kParts<S>];
  for (int t = 0; t < T; ++t)
    for (int part = 0; part < kParts<S>; ++part) total[t][part] = S::all(0);
  for (int64_t g = panel * groups; g < (panel + 1) * groups; ++g) {
    const Codes codes(weight, g);
    Floats sums[kSets][T][kParts<S>];
    for (auto& set : sums)
      for (auto& of : set)
        for (auto& sum : of) sum = S::all(0);
    for (int64_t line = 0; line < lines; ++line, words += kPanel, x += Codes::kRows * T) {
      typename Codes::Line line_of[kParts<S>];
      ask_ahead(words);
#pragma GCC unroll 16
      for (int part = 0; part < kParts<S>; ++part) line_of[part] = codes.line(S::load(words + part * S::kLanes), part);
#pragma GCC unroll 16
      for (int row = 0; row < Codes::kRows; ++row) {
        Floats value[kParts<S>];
#pragma GCC unroll 16
        for (int part = 0; part < kParts<S>; ++part) value[part] = codes.value(line_of[part], row, part);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const Floats input = S::all(x[row * T + t]);
#pragma GCC unroll 16
          for (int part = 0; part < kParts<S>; ++part)
            sums[row % kSets][t][part] = S::plus_product(sums[row % kSets][t][part], input, value[part]);
        }
      }
    }
    for (int part = 0; part < kParts<S>; ++part) {
      const Floats scale = S::read(weight.scales, weight.scale_type, g * kPanel + part * S::kLanes);
      for (int t = 0; t < T; ++t) {
        Floats sum = sums[0][t][part];
        for (int set = 1; set < kSets; ++set) sum = S::plus(sum, sums[set][t][part]);
        if constexpr (Codes::kFactor != 1) sum = S::times(sum, S::all(1 / Codes::kFactor));
        total[t][part] = S::plus_product(total[t][part], scale, sum);
      }
    }
  }
  for (int t = 0; t < T; ++t)
    for (int part = 0; part < kParts<S>; ++part) S::store(totals + t * kPanel + part * S::kLanes, total[t][part]);
}

/// Decodes rows [first, first + count) of a group, followed by its scales; `tile`: (kDepth + 1) x 16.
template <class S, class Codes>
void spell(const Panels& weight, int64_t panel, int64_t g, int64_t first, int64_t count, float* tile) {
  const int64_t groups = weight.rows / weight.run, group = panel * groups + g;
  const uint32_t* words = weight.words + (panel * weight.rows + g * weight.run + first) / Codes::kRows * kPanel;
  const Codes codes(weight, group);
  const auto factor = S::all(1 / Codes::kFactor);
  float* to = tile;
  for (int64_t line = 0; line < count / Codes::kRows; ++line, words += kPanel, to += Codes::kRows * kPanel)
#pragma GCC unroll 16
    for (int part = 0; part < kParts<S>; ++part) {
      const auto line_of = codes.line(S::load(words + part * S::kLanes), part);
#pragma GCC unroll 16
      for (int row = 0; row < Codes::kRows; ++row) {
        const auto value = codes.value(line_of, row, part);
        S::store(to + row * kPanel + part * S::kLanes, Codes::kFactor == 1 ? value : S::times(value, factor));
      }
    }
  for (int part = 0; part < kParts<S>; ++part)
    S::store(tile + kDepth * kPanel + part * S::kLanes,
             S::read(weight.scales, weight.scale_type, group * kPanel + part * S::kLanes));
}

/// totals (T, 16) += scales * (x (T, rows) times a tile's rows)
template <class S, int T>
void multiply_tile(const float* tile, int64_t rows, const float* x, float* totals) {
  using Floats = typename S::Floats;
  Floats sums[T][kParts<S>];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
    for (int part = 0; part < kParts<S>; ++part) sums[t][part] = S::all(0);
  const float* from = tile;
  for (int64_t row = 0; row < rows; ++row, from += kPanel, x += T) {
    Floats value[kParts<S>];
#pragma GCC unroll 16
    for (int part = 0; part < kParts<S>; ++part) value[part] = S::load(from + part * S::kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const Floats input = S::all(x[t]);
#pragma GCC unroll 16
      for (int part = 0; part < kParts<S>; ++part)
        sums[t][part] = S::plus_product(sums[t][part], input, value[part]);
    }
  }
#pragma GCC unroll 16
  for (int part = 0; part < kParts<S>; ++part) {
    const Floats scale = S::load(tile + kDepth * kPanel + part * S::kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      float* const total = totals + t * kPanel + part * S::kLanes;
      S::store(total, S::plus_product(S::load(total), scale, sums[t][part]));
    }
  }
}

template <class S>
void multiply_block(int tokens, const float* tile, int64_t rows, const float* x, float* totals) {
  switch (tokens) {
    case 1:
      return multiply_tile<S, 1>(tile, rows, x, totals);
    case 2:
      return multiply_tile<S, 2>(tile, rows, x, totals);
    case 3:
      return multiply_tile<S, 3>(tile, rows, x, totals);
    case 4:
      return multiply_tile<S, 4>(tile, rows, x, totals);
    case 5:
      return multiply_tile<S, 5>(tile, rows, x, totals);
    default:
      return multiply_tile<S, kBlock>(tile, rows, x, totals);
  }
}

/// Writes the sums of a panel, (tokens, 16), less offsets plus a bias to the outputs; skips padding.
template <class S>
void finish(const Outputs& out, const Tokens& tokens, int64_t panel, float* totals) {
  if (out.sums) subtract_offsets<S>(*out.sums, tokens, panel, totals);
  const int64_t n = panel * kPanel, left = out.N - n, columns = left < kPanel ? left : kPanel;
  const size_t size = out.type == Float::kFloat32 ? 4 : 2;
  alignas(64) float bias[kPanel] = {};
  if (out.bias) std::memcpy(bias, out.bias + n, static_cast<size_t>(columns) * 4);
  for (int64_t m = 0; m < tokens.count; ++m, totals += kPanel) {
    alignas(64) uint8_t rounded[kPanel * 4];
    for (int part = 0; part < kParts<S>; ++part) {
      const int at = part * S::kLanes;
      S::write(S::plus(S::load(totals + at), S::load(bias + at)), rounded, out.type, at);
    }
    uint8_t* const to = static_cast<uint8_t*>(out.y) + static_cast<size_t>((tokens.first + m) * out.N + n) * size;
    std::memcpy(to, rounded, static_cast<size_t>(columns) * size);
  }
}

/// The number of panels decoded at once: for few tokens, limited by the first-level cache.
inline int64_t together(int64_t tokens) { return tokens <= 32 ? 2 : 8; }

inline int64_t scratch_of(int64_t tokens) { return together(tokens) * (kTile + tokens * kPanel); }

template <class S, class Codes>
void multiply_many(const Panels& weight, const Tokens& tokens, const Outputs& out, int64_t begin, int64_t end,
                   float* scratch) {
  const int64_t several = together(tokens.count), sums = tokens.count * kPanel;
  float* const totals = scratch + several * kTile;
  for (int64_t panel = begin; panel < end; panel += several) {
    const int64_t here = end - panel < several ? end - panel : several;
    std::memset(totals, 0, static_cast<size_t>(here * sums) * sizeof(float));
    for (int64_t row = 0; row < weight.rows;) {
      const int64_t within = row % weight.run, left = weight.run - within, rows = left < kDepth ? left : kDepth;
      for (int64_t i = 0; i < here; ++i)
        spell<S, Codes>(weight, panel + i, row / weight.run, within, rows, scratch + i * kTile);
      for (int64_t m = 0; m < tokens.count; m += kBlock) {
        const int block = static_cast<int>(tokens.count - m < kBlock ? tokens.count - m : kBlock);
        const float* const x = tokens.x + m * weight.rows + row * block;
        for (int64_t i = 0; i < here; ++i)
          multiply_block<S>(block, scratch + i * kTile, rows, x, totals + i * sums + m * kPanel);
      }
      row += rows;
    }
    for (int64_t i = 0; i < here; ++i) finish<S>(out, tokens, panel + i, totals + i * sums);
  }
}

template <class S, class Codes>
void multiply_codes(const Panels& weight, const Tokens& tokens, const Outputs& out, int64_t begin, int64_t end,
                    int few, float* scratch) {
  if (tokens.count > few || tokens.count > kMostFew)
    return multiply_many<S, Codes>(weight, tokens, out, begin, end, scratch);
  constexpr decltype(&multiply_few<S, Codes, 1>) ways[] = {multiply_few<S, Codes, 1>, multiply_few<S, Codes, 2>,
                                                           multiply_few<S, Codes, 3>, multiply_few<S, Codes, 4>,
                                                           multiply_few<S, Codes, 5>, multiply_few<S, Codes, 6>};
  for (int64_t panel = begin; panel < end; ++panel) {
    ways[tokens.count - 1](weight, panel, tokens.x, scratch);
    finish<S>(out, tokens, panel, scratch);
  }
}

template <class S>
void multiply(const Panels& weight, const Tokens& tokens, const Outputs& out, int64_t begin, int64_t end, int few,
              float* scratch) {
  const auto way = weight.bits == 8 ? multiply_codes<S, Wide<S, 8>>
                   : weight.narrow  ? multiply_codes<S, Nibbles<S>>
                                    : multiply_codes<S, Wide<S, 4>>;
  way(weight, tokens, out, begin, end, few, scratch);
}

}  // namespace
}  // namespace qload::cpu
