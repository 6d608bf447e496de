// How elements of 2, 4, 8, 16 or 32 bits get from one packed order to another: a plan of shifts and shuffles.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]     for every value of every digit
//
// A part of the digits makes a tile, of which whole registers are loaded and whole registers stored. Its
// elements move as the bits of their index do: bit i of an element's index is bit position i of its address
// within a register, or tells registers apart. Three steps suffice for any change of places:
//
//   exchange  the bit that tells two registers apart with one of a position: a shift and a blend
//   swap      two positions, the lower one inside of a byte: two shifts in 64 bits
//   permute   whole bytes of a register: one shuffle
//
// Parts of a move that no power of two divides get plans with narrower registers, and what is left after
// those goes element by element.
#pragma once

#include <cstdint>
#include <vector>

#include "../shared/digit.h"

namespace qload::cpu {

constexpr int kMostRegisters = 256;
constexpr int kTileBytes = 1 << 11;  // that a step goes through, where the move has as many
constexpr int kMostSteps = 32;
constexpr int kMostShuffles = 8;
constexpr int kMostDigits = 16;

struct Step {
  enum Kind : uint8_t { kExchange, kSwap, kPermute } kind;
  uint8_t reg;        // kExchange: which bit of the register's number
  uint8_t low, high;  // positions: bits of a bit's address in its register
  int table;          // kPermute: which of the plan's shuffles
};

struct Shuffle {  // of the bytes of a register
  uint8_t source[64];
  bool crosses;                  // for registers of two 16-byte lanes: between them, after `first`
  uint8_t first[32], second[32];  // shuffles inside of the lanes
};

// Nothing but numbers: code for one instruction set reads it, and must not share inlined functions.
struct Plan {
  int bits = 0;   // of an element
  int width = 0;  // bytes of a register; 0: element by element
  int64_t from_element = 0, to_element = 0;  // where it starts

  int registers = 0;
  int64_t from[kMostRegisters], to[kMostRegisters];  // bytes; `to` rises
  int16_t last[kMostRegisters];                      // which register goes to `to[i]`
  int steps = 0;
  Step step[kMostSteps];
  int shuffles = 0;
  Shuffle shuffle[kMostShuffles] = {};
  int loops = 0;
  Digit loop[kMostDigits];  // innermost first; strides in bytes
  int64_t tiles = 1;
  bool even = false;  // every register goes to a multiple of its width

  int digits = 0;
  Digit digit[kMostDigits];  // element by element: innermost first
};

enum class Pace { kTarget, kSource };  // the side in whose memory tiles follow each other: what no cache holds

/// Plans that together move every element once. `widest`: bytes of the widest register.
std::vector<Plan> make_plans(int bits, const std::vector<Digit>& digits, int widest, Pace pace = Pace::kTarget);

}  // namespace qload::cpu
