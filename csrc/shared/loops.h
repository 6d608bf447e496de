// Where a number lies whose digits count in nested loops, the innermost first.
//
// In an unnamed namespace, as is all that code for one instruction set includes: what a linker keeps of an inline
// function could be a copy that lesser machines cannot run.
#pragma once

#include <cstdint>

#include "both.h"
#include "digit.h"

namespace qload {
namespace {

struct Offsets {
  int64_t from = 0, to = 0, row = 0;
};

/// What the digits of `number` add up to; `at`, if it is asked for: each of them.
inline QLOAD_BOTH Offsets offsets_of(const Digit* loops, int count, int64_t number, int64_t* at = nullptr) {
  Offsets sum;
  for (int i = 0; i < count; ++i) {
    const Digit& loop = loops[i];
    const int64_t next = number / loop.size, here = number - next * loop.size;
    if (at) at[i] = here;
    sum.from += here * loop.from;
    sum.to += here * loop.to;
    sum.row += here * loop.row;
    number = next;
  }
  return sum;
}

}  // namespace
}  // namespace qload
