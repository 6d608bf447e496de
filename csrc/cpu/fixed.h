// The inputs of one token as integers, group by group, for products of bytes.
//
//   x[k] = unit * (65536 * high[k] + 256 * middle[k] + low[k])      three signed bytes
//
// A group is `whole` if that is exact for each of its inputs: 0, or bfloat16 less than 2**15 times as large as
// each other; 2**14 if the largest has all of its 8 bits. Then sums of products with codes are exact integers,
// and so are their differences from zero points times sums of inputs. Other groups are multiplied as float32.
//
//   bytes   uint32  (rows/8, 3, 2)   of 8 rows: the high bytes of rows 0, 2, 4, 6, then of rows 1, 3, 5, 7; then the
//                                    middle and the low bytes alike
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "halves.h"
#include "kernels.h"

namespace qload::cpu {
namespace {

constexpr int kWholeBits = 23;  // of an input without its sign, or one less: the largest of three bytes is smaller
constexpr float kMostWhole = 127 * 65536 + 127 * 256 + 127;
constexpr int kLeastExponent = -80;  // the least exponent for which products with units are normal numbers

/// Splits a group's inputs into bytes; false if the group is not whole.
inline bool cut(const float* x, int64_t rows, FixedGroup& group, uint32_t* bytes) {
  uint32_t most = 0;
  for (int64_t row = 0; row < rows; ++row) most = std::max(most, bits_of(x[row]) & 0x7FFFFFFF);
  const int exponent = most ? static_cast<int>(most >> 23) - 126 : 0;  // |x| < 2**exponent
  if (exponent < kLeastExponent || most >= 0x7F800000) return false;
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const int bits = std::ldexp(largest, kWholeBits - exponent) > kMostWhole ? kWholeBits - 1 : kWholeBits;
  group.unit = std::ldexp(1.0f, exponent - bits);
  const float inverse = std::ldexp(1.0f, bits - exponent);
  std::fill_n(bytes, rows / kFixedRows * kFixedWords, 0u);
  for (int64_t row = 0; row < rows; ++row) {
    const float scaled = x[row] * inverse;
    const auto whole = static_cast<int32_t>(scaled);
    if (static_cast<float>(whole) != scaled) return false;
    uint32_t* const to = bytes + row / kFixedRows * kFixedWords + row % 2;
    int32_t left = whole;
    for (int part = kFixedParts - 1; part >= 0; --part) {
      const auto byte = static_cast<int8_t>(left & 255);
      left = (left - byte) / 256;
      group.sums[part] += byte;
      to[2 * part] |= static_cast<uint32_t>(static_cast<uint8_t>(byte)) << row % kFixedRows / 2 * 8;
    }
  }
  return true;
}

/// One token's inputs in the order of a weight's rows.
class FixedInputs {
 public:
  FixedInputs(const float* x, int64_t rows, int64_t run) : groups_(static_cast<size_t>(rows / run)) {
    bytes_.resize(static_cast<size_t>(rows / kFixedRows * kFixedWords));
    for (int64_t g = 0; g < rows / run; ++g) {
      FixedGroup& group = groups_[static_cast<size_t>(g)];
      group.whole = cut(x + g * run, run, group, bytes_.data() + g * run / kFixedRows * kFixedWords);
    }
    token_ = {x, groups_.data(), bytes_.data()};
  }

  const FixedToken& token() const { return token_; }

 private:
  std::vector<FixedGroup> groups_;
  std::vector<uint32_t> bytes_;
  FixedToken token_;
};

}  // namespace
}  // namespace qload::cpu
