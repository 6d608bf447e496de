// The description of a move between two orders, on a CPU and on a GPU.
//
//   to[sum digit * to] = from[sum digit * from]     for every value of every digit
//
// Numbers only: code for one instruction set, and kernels, read it without any function.
#pragma once

#include <cstdint>

namespace qload {

struct Digit {
  int64_t size, from, to;  // strides: in elements, unless a caller states bytes or words
  int64_t row = 0;         // stride in the index of a looked-up row
};

}  // namespace qload
