// Offsets of an element by its number in nested loops, innermost first.
//
// In an unnamed namespace, like all code included for one instruction set: a linker might keep a single copy of an
// inline function, and lesser machines could not run it.
#pragma once

#include <cstdint>

#include "both.h"
#include "digit.h"

namespace qload {
namespace {

struct Offsets {
  int64_t from = 0, to = 0, row = 0;
};

/// The offsets of element `number`; `at` receives each digit unless it is null.
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
