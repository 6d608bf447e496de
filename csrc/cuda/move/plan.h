// How elements of 2, 4, 8, 16 or 32 bits get from one packed order to another on a GPU: which bits of an
// element's number are register, thread and block.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]     for every value of every digit
//
// Units of 4, 2 or 1 bytes are loaded and stored whole. The bits of a number that lie inside of a unit, on
// either side, belong to one thread, which brings them to their places in at most four steps:
//
//   exchange  the bit that tells two registers apart with one of a position inside of a unit
//   swap      two positions inside of a unit
//
// Eight more bits are the thread, chosen so that a warp loads neighbours; a block then stores what it has
// through shared memory, so that a warp stores neighbours too. The rest are loops over blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "../../shared/digits.h"

namespace qload::cuda {

constexpr int kThreadBits = 8, kMostRegisterBits = 5, kMostTileBits = kThreadBits + kMostRegisterBits;
constexpr int kMostRegisters = 1 << kMostRegisterBits;
constexpr int kMostSteps = 4;
constexpr int kMostLoops = 14;

struct Step {
  int reg;        // which bit of the register's number; -1: a swap inside of a unit
  int shift;      // bits between the two positions, or up to the position
  uint32_t mask;  // of what goes
};

struct Loop {
  uint32_t size;
  uint32_t factor, shift;  // a number below 2**31 divided by size: its product with factor, >> 32, >> shift
  int64_t from, to, row;   // strides in units, of a row in rows
};

struct Plan {
  int unit;           // bytes
  int thread_bits;
  int register_bits;  // of units that a thread has
  int steps;
  Step step[kMostSteps];
  int32_t from_thread[kThreadBits], from_register[kMostRegisters];  // units
  int32_t place_thread[kThreadBits], place_register[kMostRegisters];  // in shared memory, in the order of `to`
  int32_t to_bit[kMostTileBits];                                    // of each bit of a place, in units
  int run;  // bytes that lie together in `to` and start at multiples of it, at most 16
  int loops;
  Loop loop[kMostLoops];  // innermost first
  int64_t blocks;
};

/// Where units come from when rows are looked up: what each bit adds, in elements and rows.
struct Look {
  bool whole;  // every unit is of one row, and loaded as one: then in units, of registers as they are loaded
  int64_t from_thread[kThreadBits], row_thread[kThreadBits];
  int64_t from_register[kMostRegisters], row_register[kMostRegisters];
  int64_t from_element[16], row_element[16];
};

/// False: the digits do not divide into units, element by element is what is left. `look`: rows are looked up,
/// then digits that count rows do not count in `from`. Blocks have at least 2**least_thread_bits threads.
bool make_plan(int bits, const std::vector<Digit>& digits, uintptr_t from, uintptr_t to, int least_register_bits,
               Plan& plan, int least_thread_bits = 5, Look* look = nullptr);

}  // namespace qload::cuda
