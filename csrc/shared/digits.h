// Functions on the digits of a move, for the planners of both modules.
#pragma once

#include <vector>

#include "digit.h"

namespace qload {

struct Bit {  // of an element's index
  int digit, level;
  bool operator==(const Bit& other) const { return digit == other.digit && level == other.level; }
};

struct Cut {  // a digit to cut to a multiple of a power of two; -1: none would help
  int digit = -1;
  int64_t multiple = 1;
};

/// The logarithm of the least power of two not below a number.
int log2_of(int64_t number);

/// The number of factors 2 of a size, which is not 0.
int twos(int64_t size);

/// Drops digits of size 1 and merges digits contiguous on both sides; sets `empty` if there is no element.
std::vector<Digit> merged(const std::vector<Digit>& digits, bool& empty);

/// Finds the `need` lowest address bits of one side, lowest first. False if digits of a power of two do not cover
/// them; `cut` is then the digit in the way.
bool lowest(const std::vector<Digit>& digits, int64_t Digit::*side, int need, std::vector<Bit>& bits,
            Cut* cut = nullptr);

}  // namespace qload
