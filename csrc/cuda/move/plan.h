// A plan to move elements of 2, 4, 8, 16 or 32 bits from one packed order to another on a GPU: which bits of an
// element's number are register, thread and block.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]     for every value of every digit
//
// Units of 4, 2 or 1 bytes are loaded and stored whole. The bits of a number that are within a unit, on either side,
// belong to one thread, which moves them in at most four steps:
//
//   exchange  a bit of the register number with a bit of the position within a unit
//   swap      two bits of the position within a unit
//
// Eight more bits are the thread number, chosen so that neighbouring lanes load neighbours; a block then stores through
// shared memory, so that neighbouring lanes also store neighbours. The remaining bits are loops over blocks.
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
  int reg;        // bit of the register number; -1: a swap within a unit
  int shift;      // bits between the two positions, or up to the position
  uint32_t mask;  // of the moved elements
};

struct Loop {
  uint32_t size;
  uint32_t factor, shift;  // division of a number below 2**31 by `size`: number * factor >> 32 >> shift
  int64_t from, to, row;   // strides in units; of a row in rows
};

struct Plan {
  int unit;           // bytes
  int thread_bits;
  int register_bits;  // of units of a thread
  int steps;
  Step step[kMostSteps];
  int32_t from_thread[kThreadBits], from_register[kMostRegisters];  // units
  int32_t place_thread[kThreadBits], place_register[kMostRegisters];  // in shared memory, in the order of `to`
  int32_t to_bit[kMostTileBits];                                    // of each bit of a place, in units
  int run;  // contiguous, aligned bytes in `to`, at most 16
  int loops;
  Loop loop[kMostLoops];  // innermost first
  int64_t blocks;
};

/// Source of units if rows are looked up: the contribution of each bit, in elements and rows.
struct Look {
  bool whole;  // every unit is of one row and is loaded at once: then in units, of registers in the order of loads
  int64_t from_thread[kThreadBits], row_thread[kThreadBits];
  int64_t from_register[kMostRegisters], row_register[kMostRegisters];
  int64_t from_element[16], row_element[16];
};

/// False: the digits do not divide into units; `move_elements` remains. `look`: rows are looked up, and digits that count
/// rows have no stride in `from`. Blocks have at least 2**least_thread_bits threads.
bool make_plan(int bits, const std::vector<Digit>& digits, uintptr_t from, uintptr_t to, int least_register_bits,
               Plan& plan, int least_thread_bits = 5, Look* look = nullptr);

}  // namespace qload::cuda
