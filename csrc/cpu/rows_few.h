// Few tokens times rows of codes, decoded to floats in registers without a copy in memory.
//
//   totals[t, r] = sum over runs of scale * factor * (sum over c of x[t, c] * (value(code[r, c]) - zero))
//
// A row is read in blocks. A decoder `D` leaves the codes of a block in consecutive registers: value `i` of these
// is code `D::code(i)` of the block. Inputs are put into that order once (product.cpp), as float32 or, if `D::kInputs`
// is not 0, as the sum of that many bfloat16, two in a word: for each register of values one register of each part of
// each token. All codes of a lane have the same scale; a decoder with `kScales` applies scales itself, and adds up a
// row. Values come from a table, sums are in float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ahead.h"
#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int64_t kNear = 4096;  // words of inputs, of all tokens, for the first-level cache
constexpr int kMostOfTwoRows = 4;  // largest number of tokens for two rows with common loads of inputs

/// Words of inputs in a block.
template <class D>
constexpr int64_t kWords = D::kInputs ? D::kBlock / 2 * D::kInputs : D::kBlock;

/// Scales or zero points of a block, one for each lane, if a block has several runs, or a run ends within a lane's
/// codes; `rest`: for lanes behind the last column.
template <class D>
typename D::S::Floats of_lanes(const float* table, int64_t run, int64_t column, int64_t columns, float rest) {
  using S = typename D::S;
  alignas(64) float each[S::kLanes];
  for (int lane = 0; lane < S::kLanes; ++lane) {
    const int64_t at = column + lane / D::kLanesOfSpan * D::kSpan;
    each[lane] = at < columns ? table[at / run] : rest;
  }
  return S::load(each);
}

/// One row times T tokens, some blocks at a time; `Zeros`: whether values have zero points.
template <class D, bool kZeros, int T>
class RowTimesFew {
 public:
  using S = typename D::S;
  using Floats = typename S::Floats;

  RowTimesFew(const Meaning& m, const D& decoder, const uint8_t* codes, int64_t columns, const uint32_t* x)
      : m_(m), decoder_(decoder), codes_(codes), columns_(columns), x_(x) {
    for (auto& each : total_) each = S::all(0);
  }

  /// Adds the products of columns [begin, end): whole blocks, or up to the last column.
  void add(int64_t begin, int64_t end, float* totals) {
    const int64_t run = m_.run < columns_ ? m_.run : columns_, whole = end / D::kBlock * D::kBlock;
    if (run == columns_ || run % D::kBlock == 0) {
      int64_t group = begin / run;
      for (int64_t c = begin, next; c < end; c = next, ++group) {
        next = std::min((group + 1) * run, end);
        stretch(c, next, zero(group), S::all(m_.scale[group]));
      }
    } else if (D::kBlock % run == 0) {
      runs_in_blocks(begin, whole, run);
      apart(whole, end);
    } else {
      apart(begin, end);
    }
    for (int t = 0; t < T; ++t) totals[t * kPanel] += S::across(total_[t]);
  }

 private:
  static constexpr int kSets = T == 1 ? 4 : T <= 4 ? 2 : 1;  // independent sums, to hide latency

  Floats zero(int64_t group) const {
    if constexpr (kZeros) return S::all(m_.zero[group]);
    return S::all(0);
  }

  const uint8_t* codes(int64_t column) const { return codes_ + column / D::kBlock * D::kBytes; }
  const uint32_t* inputs(int64_t column) const { return x_ + column / D::kBlock * (T * kWords<D>); }

  /// Adds columns [begin, end): whole blocks, each of several whole runs.
  void runs_in_blocks(int64_t begin, int64_t end, int64_t run) {
    constexpr int kFewSets = T == 1 ? 2 : 1;
    const int each = static_cast<int>(D::kBlock / run);
    const typename S::Spread spread(each, static_cast<int>(run / D::kSpan) * D::kLanesOfSpan);
    const float* zero = m_.zero + (kZeros ? begin / run : 0);
    const float* scale = m_.scale + begin / run;
    const uint8_t* from = codes(begin);
    const uint32_t* x = inputs(begin);
    Floats total[T];
    for (int t = 0; t < T; ++t) total[t] = total_[t];
    for (int64_t c = begin; c < end; c += D::kBlock, from += D::kBytes, x += T * kWords<D>, scale += each) {
      ask_ahead(from);
      Floats zeros{}, sums[kFewSets][T];
      if constexpr (kZeros) {
        zeros = spread.of(zero);
        zero += each;
      }
#pragma GCC unroll 4
      for (auto& set : sums)
#pragma GCC unroll 8
        for (auto& sum : set) sum = S::all(0);
      block(from, x, zeros, sums);
      const Floats scales = spread.of(scale);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) total[t] = S::plus(total[t], scaled(together(sums, t), scales));
    }
    for (int t = 0; t < T; ++t) total_[t] = total[t];
  }

  /// Adds columns [begin, end) with different scales for the lanes of a block.
  void apart(int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += D::kBlock) {
      Floats zeros{};
      if constexpr (kZeros) zeros = of_lanes<D>(m_.zero, m_.run, c, columns_, 0);
      stretch(c, std::min(c + D::kBlock, end), zeros, of_lanes<D>(m_.scale, m_.run, c, columns_, 1));
    }
  }

  /// Adds columns [begin, end) with one scale for each lane.
  [[gnu::always_inline]] inline void stretch(int64_t begin, int64_t end, Floats zeros, Floats scales) {
    Floats sums[kSets][T];
#pragma GCC unroll 4
    for (auto& set : sums)
#pragma GCC unroll 8
      for (auto& sum : set) sum = S::all(0);
    int64_t c = begin;
    const uint8_t* from = codes(begin);
    const uint32_t* x = inputs(begin);
    for (; c + D::kBlock <= end; c += D::kBlock, from += D::kBytes, x += T * kWords<D>) {
      ask_ahead(from);
      block(from, x, zeros, sums);
    }
    if (c < end) {
      alignas(64) uint8_t last[D::kBytes] = {};
      std::memcpy(last, from, static_cast<size_t>(((end - c) * m_.bits + 7) / 8));
      block(last, x, zeros, sums);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) total_[t] = S::plus(total_[t], scaled(together(sums, t), scales));
  }

  template <int kCount>
  [[gnu::always_inline]] static inline Floats together(const Floats (&sums)[kCount][T], int t) {
    Floats sum = sums[0][t];
#pragma GCC unroll 4
    for (int set = 1; set < kCount; ++set) sum = S::plus(sum, sums[set][t]);
    return sum;
  }

  [[gnu::always_inline]] inline Floats scaled(Floats sum, Floats scales) const {
    if constexpr (D::kFactor != 1) sum = S::times(sum, S::all(D::kFactor));
    sum = m_.divide ? S::over(sum, scales) : S::times(sum, scales);
    return m_.factor == 1 ? sum : S::times(sum, S::all(m_.factor));
  }

  template <int kCount>
  [[gnu::always_inline]] inline void block(const uint8_t* from, const uint32_t* x, Floats zeros,
                                           Floats (&sums)[kCount][T]) const {
    constexpr int kInputs = D::kInputs ? D::kInputs : 1;
    const auto block = decoder_.load(from);
#pragma GCC unroll 16
    for (int part = 0; part < D::kParts; ++part) {
      auto value = decoder_.value(block, part);
      if constexpr (kZeros) value = S::minus(value, zeros);
#pragma GCC unroll 2
      for (int input = 0; input < kInputs; ++input)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          Floats& sum = sums[part % kCount][t];
          sum = D::plus_product(sum, x + ((part * kInputs + input) * T + t) * S::kLanes, value);
        }
    }
  }

  const Meaning& m_;
  const D decoder_;
  const uint8_t* codes_;
  int64_t columns_;
  const uint32_t* x_;
  Floats total_[T];
};

template <class D, bool kZeros, int T>
void dots_of_some(const RowsOfCodes& rows, const D& decoder, const uint32_t* x, float* totals) {
  constexpr int64_t kColumns = kNear / T / kWords<D> * D::kBlock;
  for (int64_t c = 0; c < rows.columns; c += kColumns)
    for (int r = 0, taken = 1; r < rows.count; r += taken) {
      const int64_t end = std::min(c + kColumns, rows.columns);
      if constexpr (D::kScales) {
        const uint32_t* const inputs = x + c / D::kBlock * (T * kWords<D>);
        constexpr int kMost = T <= kMostOfTwoRows ? 2 : 1;
        taken = r + kMost <= rows.count ? kMost : 1;
        if (taken == kMost)
          decoder.template add<T, kMost>(rows, r, c, end, inputs, totals + r);
        else
          decoder.template add<T, 1>(rows, r, c, end, inputs, totals + r);
      } else {
        const uint8_t* const codes = rows.codes + r * rows.row_bytes;
        RowTimesFew<D, kZeros, T>(rows.meaning[r], decoder, codes, rows.columns, x).add(c, end, totals + r);
      }
    }
}

template <class D, bool kZeros>
void dots_of(const RowsOfCodes& rows, const D& decoder, const uint32_t* x, int tokens, float* totals) {
  switch (tokens) {
    case 1:
      return dots_of_some<D, kZeros, 1>(rows, decoder, x, totals);
    case 2:
      return dots_of_some<D, kZeros, 2>(rows, decoder, x, totals);
    case 3:
      return dots_of_some<D, kZeros, 3>(rows, decoder, x, totals);
    case 4:
      return dots_of_some<D, kZeros, 4>(rows, decoder, x, totals);
    case 8:
      if constexpr (D::kMost >= 8) return dots_of_some<D, kZeros, 8>(rows, decoder, x, totals);
      [[fallthrough]];
    default:
      if constexpr (D::kMost > 4) return dots_of_some<D, kZeros, D::kMost>(rows, decoder, x, totals);
  }
}

template <class D>
D made(const RowsOfCodes& rows) {
  if constexpr (std::is_constructible_v<D, const Meaning&, const ByteScales&>)
    return D(rows.meaning[0], *rows.how);
  else
    return D(rows.meaning[0]);
}

/// Multiplies the rows of a panel with up to 4 or `D::kMost` tokens, in stretches of columns with inputs that fit the
/// first-level cache; adds to `totals`: (tokens, 16).
template <class D>
void dots_of_rows(const RowsOfCodes& rows, const uint32_t* x, int tokens, float* totals) {
  const D decoder = made<D>(rows);
  if constexpr (!D::kInputs)
    if (rows.meaning[0].zero) return dots_of<D, true>(rows, decoder, x, tokens, totals);
  dots_of<D, false>(rows, decoder, x, tokens, totals);
}

/// Whether `D` supports this meaning; fills in `way`.
template <class D>
bool takes(const Meaning& m, FewRows& way) {
  if (!D::reads(m) || m.group || (m.run % D::kSpan && m.run < way.columns)) return false;
  way.block = D::kBlock;
  way.lanes = D::S::kLanes;
  way.inputs = D::kInputs;
  way.most = D::kMost;
  way.dots = dots_of_rows<D>;
  for (int i = 0; i < D::kBlock; ++i) way.order[i] = static_cast<uint8_t>(D::code(i, m));
  return true;
}

/// Inputs as float32.
template <class Lanes>
struct FloatInputs {
  using S = Lanes;
  static constexpr int kInputs = 0, kMost = 4;
  static constexpr bool kScales = false;
  static typename S::Floats plus_product(typename S::Floats sum, const uint32_t* x, typename S::Floats value) {
    return S::plus_product(sum, S::as_floats(S::load(x)), value);
  }
};

/// 4-bit codes: 8 a lane, each looked up in a table of 16 floats.
template <class Lanes>
struct Sixteen : FloatInputs<Lanes> {
  using S = Lanes;
  static constexpr int kParts = 8, kBlock = 8 * S::kLanes, kBytes = kBlock / 2, kSpan = 8, kLanesOfSpan = 1;
  static constexpr float kFactor = 1;
  typename S::Table table;

  explicit Sixteen(const Meaning& m) : table(floats(m).data) {}
  static bool reads(const Meaning& m) { return m.bits == 4; }
  static int code(int at, const Meaning& m) {
    const int part = at / S::kLanes;
    return at % S::kLanes * 8 + (m.high_first ? part ^ 1 : part);
  }
  static typename S::Words load(const uint8_t* from) { return S::load_bytes(from); }
  typename S::Floats value(typename S::Words words, int part) const { return table.nibble(words, 4 * part); }

 private:
  struct Values {
    alignas(64) float data[16];
  };
  static Values floats(const Meaning& m) {
    Values all;
    for (int i = 0; i < 16; ++i) all.data[i] = m.lookup ? m.lookup[i] : static_cast<float>(i);
    return all;
  }
};

}  // namespace
}  // namespace qload::cpu
