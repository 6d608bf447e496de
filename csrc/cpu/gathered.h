// The inputs of a token in the order of a panel's rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "product.h"
#include "rows_many.h"
#include "upper.h"

namespace qload::cpu {
namespace {

/// The input of each row of the weight: place[row], -1 for padding.
std::vector<int32_t> places(const Panels& weight, const Inputs& in) {
  std::vector<int32_t> place(static_cast<size_t>(weight.rows), -1);
  int64_t i = 0;
  for (int64_t start = 0; start < weight.rows && i < in.K; start += weight.run)
    for (int64_t row = start; row < start + in.group && i < in.K; ++row, ++i) {
      const int32_t from = in.perm ? in.perm[i] : static_cast<int32_t>(i);
      if (from < 0 || from >= in.K) throw std::invalid_argument("a permutation leaves the inputs");
      place[static_cast<size_t>(row)] = from;
    }
  if (i < in.K) throw std::invalid_argument("the weight has fewer rows than there are inputs");
  return place;
}

/// Writes a token's floats as pairs of bfloat16, `step` apart.
void pairs_of(const float* row, int64_t rows, int parts, int64_t step, uint32_t* to) {
  for (int64_t line = 0; line < rows; line += 2 * kPairs)
    for (int pair = 0; pair < kPairs; ++pair) {
      float first = row[line + pair], second = row[line + pair + kPairs];
      for (int part = 0; part < parts; ++part, to += step) *to = pair_of(first, second);
    }
}

class Gathered {
 public:
  Gathered(const Kernels& kernels, const Panels& weight, const Inputs& in) : kernels_(kernels), in_(in) {
    if (!in.perm && weight.run == in.group) return;
    place_ = places(weight, in);
  }

  /// Gathers tokens [first, first + count), block after block, into count * rows floats.
  void fill(int64_t first, int64_t count, int64_t rows, float* to) const {
    auto row = room();
    for (int64_t m = 0; m < count; ++m) {
      const int64_t block = m / kBlock * kBlock, size = std::min<int64_t>(kBlock, count - block);
      one(first + m, rows, to + block * rows + (m - block), size, row.data());
    }
  }

  /// Gathers the same tokens as `parts` of bfloat16, in pairs; see pairs.h.
  void fill_pairs(int64_t first, int64_t count, int64_t rows, int parts, uint32_t* to) const {
    std::vector<float> token(static_cast<size_t>(rows)), row = room();
    for (int64_t start = 0; start < count; start += kPairTokens) {
      const int block = paired(count - start);
      for (int t = 0; t < block; ++t) {
        if (start + t < count)
          one(first + start + t, rows, token.data(), 1, row.data());
        else
          std::fill(token.begin(), token.end(), 0.0f);
        pairs_of(token.data(), rows, parts, block, to + t);
      }
      to += block * parts * rows / 2;
    }
  }

  /// Gathers a token into `rows` floats `step` apart. `row`: the thread's buffer from `room`.
  void one(int64_t token, int64_t rows, float* to, int64_t step, float* row) const {
    if (place_.empty()) {
      widen_one(kernels_, in_, token, to, step);
      for (int64_t r = in_.K; r < rows; ++r) to[r * step] = 0;
      return;
    }
    widen_one(kernels_, in_, token, row, 1);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t from = place_[static_cast<size_t>(r)];
      to[r * step] = from < 0 ? 0 : row[from];
    }
  }

  std::vector<float> room() const { return std::vector<float>(place_.empty() ? 0 : static_cast<size_t>(in_.K)); }

 private:
  const Kernels& kernels_;
  const Inputs& in_;
  std::vector<int32_t> place_;
};

}  // namespace
}  // namespace qload::cpu
