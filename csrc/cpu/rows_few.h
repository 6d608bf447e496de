// Few tokens times rows of codes that become floats in registers, and are written nowhere.
//
//   totals[t, r] = sum over runs of scale * factor * (sum over c of x[t, c] * (value(code[r, c]) - zero))
//
// A row is read in blocks, whose codes stand in registers as a decoder `D` leaves them: register `part`, lane `lane` is
// code `D::code(part, lane)` of the block. Inputs are put into that order once (product.cpp). All codes of a lane share a
// scale. A value is what the table says, sums are in float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int64_t kNear = 4096;  // inputs of all tokens, as floats, that stay near

/// Scales or zero points of a block, one a lane, where a block has several runs, or a run ends within a lane's codes;
/// `rest`: of lanes behind the last column.
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

/// A row, a stretch of blocks after another; `Zeros`: whether values lose zero points.
template <class D, bool kZeros, int T>
class RowTimesFew {
 public:
  using S = typename D::S;
  using Floats = typename S::Floats;

  RowTimesFew(const Meaning& m, const D& decoder, const uint8_t* codes, int64_t columns, const float* x, int64_t pitch)
      : m_(m), decoder_(decoder), codes_(codes), columns_(columns), x_(x), pitch_(pitch) {
    for (auto& each : total_) each = S::all(0);
  }

  /// Columns [begin, end): whole blocks, or up to the last column.
  void add(int64_t begin, int64_t end, float* totals) {
    const int64_t run = m_.run < columns_ ? m_.run : columns_, whole = end / D::kBlock * D::kBlock;
    if (run == columns_ || run % D::kBlock == 0) {
      int64_t group = begin / run;
      for (int64_t c = begin, next; c < end; c = next, ++group) {
        next = std::min((group + 1) * run, end);
        stretch(c, next, zero(group), S::all(m_.scale[group]));
      }
    } else if (D::kBlock % run == 0) {
      const int each = static_cast<int>(D::kBlock / run);
      const int lanes = static_cast<int>(run / D::kSpan) * D::kLanesOfSpan;
      int64_t group = begin / D::kBlock * each;
      for (int64_t c = begin; c < whole; c += D::kBlock, group += each) {
        Floats zeros{};
        if constexpr (kZeros) zeros = S::spread(m_.zero + group, each, lanes);
        stretch(c, c + D::kBlock, zeros, S::spread(m_.scale + group, each, lanes));
      }
      apart(whole, end);
    } else {
      apart(begin, end);
    }
    for (int t = 0; t < T; ++t) totals[t * kPanel] += S::across(total_[t]);
  }

 private:
  static constexpr int kSets = T == 1 ? 4 : 2;  // of sums, as one waits for itself

  Floats zero(int64_t group) const {
    if constexpr (kZeros) return S::all(m_.zero[group]);
    return S::all(0);
  }

  /// Columns [begin, end), of whose blocks lanes have scales of their own.
  void apart(int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += D::kBlock) {
      Floats zeros{};
      if constexpr (kZeros) zeros = of_lanes<D>(m_.zero, m_.run, c, columns_, 0);
      stretch(c, std::min(c + D::kBlock, end), zeros, of_lanes<D>(m_.scale, m_.run, c, columns_, 1));
    }
  }

  /// Columns [begin, end), whose lanes keep their scales.
  [[gnu::always_inline]] inline void stretch(int64_t begin, int64_t end, Floats zeros, Floats scales) {
    Floats sums[kSets][T];
    for (auto& set : sums)
      for (auto& sum : set) sum = S::all(0);
    int64_t c = begin;
    const uint8_t* from = codes_ + begin / D::kBlock * D::kBytes;
    for (; c + D::kBlock <= end; c += D::kBlock, from += D::kBytes) block(from, x_ + c, zeros, sums);
    if (c < end) {
      alignas(64) uint8_t last[D::kBytes] = {};
      std::memcpy(last, from, static_cast<size_t>(((end - c) * m_.bits + 7) / 8));
      block(last, x_ + c, zeros, sums);
    }
    for (int t = 0; t < T; ++t) {
      Floats sum = sums[0][t];
      for (int set = 1; set < kSets; ++set) sum = S::plus(sum, sums[set][t]);
      if constexpr (D::kFactor != 1) sum = S::times(sum, S::all(D::kFactor));
      sum = m_.divide ? S::over(sum, scales) : S::times(sum, scales);
      if (m_.factor != 1) sum = S::times(sum, S::all(m_.factor));
      total_[t] = S::plus(total_[t], sum);
    }
  }

  [[gnu::always_inline]] inline void block(const uint8_t* from, const float* x, Floats zeros, Floats (&sums)[kSets][T]) const {
    const auto block = decoder_.load(from);
#pragma GCC unroll 16
    for (int part = 0; part < D::kParts; ++part) {
      Floats value = decoder_.value(block, part);
      if constexpr (kZeros) value = S::minus(value, zeros);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        Floats& sum = sums[part % kSets][t];
        sum = S::plus_product(sum, S::load(x + t * pitch_ + part * S::kLanes), value);
      }
    }
  }

  const Meaning& m_;
  const D decoder_;
  const uint8_t* codes_;
  int64_t columns_;
  const float* x_;
  int64_t pitch_;
  Floats total_[T];
};

template <class D, bool kZeros, int T>
void dots_of_row(const RowsOfCodes& rows, int r, const D& decoder, const float* x, int64_t pitch, int64_t begin,
                 float* totals) {
  const int64_t end = std::min(begin + kNear / T / kMostOfBlock * kMostOfBlock, rows.columns);
  const uint8_t* const codes = rows.codes + r * rows.row_bytes;
  RowTimesFew<D, kZeros, T>(rows.meaning[r], decoder, codes, rows.columns, x, pitch).add(begin, end, totals + r);
}

/// Rows of a panel times up to `kFewRows` tokens, as many columns after another as have their inputs in the nearest
/// cache; adds to `totals`: (tokens, 16).
template <class D>
void dots_of_rows(const RowsOfCodes& rows, const float* x, int64_t pitch, int tokens, float* totals) {
  const D decoder(rows.meaning[0]);
  constexpr decltype(&dots_of_row<D, false, 1>) ways[2][kFewRows] = {
      {dots_of_row<D, false, 1>, dots_of_row<D, false, 2>, dots_of_row<D, false, 3>, dots_of_row<D, false, 4>},
      {dots_of_row<D, true, 1>, dots_of_row<D, true, 2>, dots_of_row<D, true, 3>, dots_of_row<D, true, 4>}};
  const auto way = ways[rows.meaning[0].zero != nullptr][tokens - 1];
  for (int64_t c = 0; c < rows.columns; c += kNear / tokens / kMostOfBlock * kMostOfBlock)
    for (int r = 0; r < rows.count; ++r) way(rows, r, decoder, x, pitch, c, totals);
}

/// How `D` reads, if it reads what is meant.
template <class D>
bool takes(const Meaning& m, FewRows& way) {
  if (!D::reads(m) || m.group || (m.run % D::kSpan && m.run < way.columns)) return false;
  way.block = D::kBlock;
  way.dots = dots_of_rows<D>;
  for (int part = 0; part < D::kParts; ++part)
    for (int lane = 0; lane < D::S::kLanes; ++lane)
      way.order[part * D::S::kLanes + lane] = static_cast<uint8_t>(D::code(part, lane, m));
  return true;
}

/// Codes of 4 bits: 8 a lane, each looked up in a table of 16 floats.
template <class Lanes>
struct Sixteen {
  using S = Lanes;
  static constexpr int kParts = 8, kBlock = 8 * S::kLanes, kBytes = kBlock / 2, kSpan = 8, kLanesOfSpan = 1;
  static constexpr float kFactor = 1;
  typename S::Table table;

  explicit Sixteen(const Meaning& m) : table(floats(m).data) {}
  static bool reads(const Meaning& m) { return m.bits == 4; }
  static int code(int part, int lane, const Meaning& m) { return 8 * lane + (m.high_first ? part ^ 1 : part); }
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
