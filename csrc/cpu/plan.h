// Plans of moves of elements of 2, 4, 8, 16 or 32 bits between two packed orders: shifts and shuffles.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]     for every value of every digit
//
// Some of the digits form a tile, loaded and stored in whole registers. The elements of a tile move as the bits of
// their index do: bit i of an index is either a bit position of the address within a register, or a bit of the
// register's number. Three kinds of steps suffice for any permutation:
//
//   exchange  a bit of the register's number and a position: a shift and a blend
//   swap      two positions, the lower one inside of a byte: two shifts in 64 bits
//   permute   whole bytes of a register: one shuffle
//
// Parts of a move with no power of two as a divisor get plans with narrower registers; the remaining elements are
// moved one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "../shared/digit.h"

namespace qload::cpu {

constexpr int kMostRegisters = 256;
constexpr int kTileBytes = 1 << 11;  // least size of a tile, if the move is as large
constexpr int kMostSteps = 32;
constexpr int kMostShuffles = 8;
constexpr int kMostDigits = 16;

struct Step {
  enum Kind : uint8_t { kExchange, kSwap, kPermute } kind;
  uint8_t reg;        // kExchange: bit of the register's number
  uint8_t low, high;  // positions: bits of a bit's address in its register
  int table;          // kPermute: index of the plan's shuffle
};

struct Shuffle {  // of the bytes of a register
  uint8_t source[64];
  bool crosses;                  // only for registers of two 16-byte lanes: an exchange of lanes after `first`
  uint8_t first[32], second[32];  // shuffles inside of the lanes
};

// Numbers only: code for one instruction set reads a plan, and must not share inlined functions.
struct Plan {
  int bits = 0;   // of an element
  int width = 0;  // bytes of a register; 0: element by element
  int64_t from_element = 0, to_element = 0;  // first element

  int registers = 0;
  int64_t from[kMostRegisters], to[kMostRegisters];  // bytes; `to` rises
  int16_t last[kMostRegisters];                      // register for `to[i]`
  int steps = 0;
  Step step[kMostSteps];
  int shuffles = 0;
  Shuffle shuffle[kMostShuffles] = {};
  int loops = 0;
  Digit loop[kMostDigits];  // innermost first; strides in bytes
  int64_t tiles = 1;
  bool even = false;  // every store is at a multiple of the width

  int digits = 0;
  Digit digit[kMostDigits];  // element by element: innermost first
};

enum class Pace { kTarget, kSource };  // the side with contiguous tiles, for data larger than the caches

/// Makes plans; together they move every element once. `widest`: bytes of the widest register.
std::vector<Plan> make_plans(int bits, const std::vector<Digit>& digits, int widest, Pace pace = Pace::kTarget);

}  // namespace qload::cpu
