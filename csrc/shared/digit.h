// How both modules say where elements lie in two orders: on a CPU and on a GPU.
//
//   to[sum digit * to] = from[sum digit * from]     for every value of every digit
//
// Nothing but numbers: code for one instruction set, and kernels, read it as it is.
#pragma once

#include <cstdint>

namespace qload {

struct Digit {
  int64_t size, from, to;  // strides: of elements, unless who has the digit says bytes or words
  int64_t row = 0;         // how it counts in the number of a row that is looked up
};

}  // namespace qload
