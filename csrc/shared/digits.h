// What planning a move asks of its digits, whatever machine the plan is for.
#pragma once

#include <vector>

#include "digit.h"

namespace qload {

struct Bit {  // of an element's number
  int digit, level;
  bool operator==(const Bit& other) const { return digit == other.digit && level == other.level; }
};

struct Cut {  // a digit that would help, were its size a multiple of a power of two; -1: none would
  int digit = -1;
  int64_t multiple = 1;
};

/// The least power of two that reaches a number, as its logarithm.
int log2_of(int64_t number);

/// How often a size, not 0, can be halved.
int twos(int64_t size);

/// Digits of size 1 left out, those that follow each other everywhere made one; empty if there is no element.
std::vector<Digit> merged(const std::vector<Digit>& digits, bool& empty);

/// The `need` lowest address bits of one side, lowest first, if digits that are powers of two hold them; else
/// false, and `cut` says which digit is in the way.
bool lowest(const std::vector<Digit>& digits, int64_t Digit::*side, int need, std::vector<Bit>& bits,
            Cut* cut = nullptr);

}  // namespace qload
