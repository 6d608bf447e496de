// Products of two operands of one or two tiles each: up to four sums, in tiles 0 to 3; the first operand is in tiles 4
// and 5, the second in 6 and 7.
#pragma once

#include "tiles.h"

namespace qload::cpu {
namespace {

template <int Value>
struct Number {
  static constexpr int value = Value;
};

/// Calls `work(i, j)` for each tile of sums.
template <int Firsts, int Seconds, class Work>
void each_sum(const Work& work) {
  work(Number<0>{}, Number<0>{});
  if constexpr (Seconds == 2) work(Number<0>{}, Number<1>{});
  if constexpr (Firsts == 2) work(Number<1>{}, Number<0>{});
  if constexpr (Firsts == 2 && Seconds == 2) work(Number<1>{}, Number<1>{});
}

template <class First, class Second>
constexpr int sums_of(First, Second) {
  return 2 * First::value + Second::value;
}

template <int Firsts, int Seconds>
void clear_sums() {
  each_sum<Firsts, Seconds>([](auto i, auto j) { Tiles::clear<sums_of(i, j)>(); });
}

struct Operand {
  const void* at;
  int64_t pitch, apart;  // of rows, and of two tiles, in bytes

  const void* second() const { return static_cast<const uint8_t*>(at) + apart; }
};

template <int Count>
void load_first(const Operand& operand) {
  Tiles::load<4>(operand.at, operand.pitch);
  if constexpr (Count == 2) Tiles::load<5>(operand.second(), operand.pitch);
}

template <int Count>
void load_second(const Operand& operand) {
  Tiles::load<6>(operand.at, operand.pitch);
  if constexpr (Count == 2) Tiles::load<7>(operand.second(), operand.pitch);
}

template <int Firsts, int Seconds>
void add_products() {
  each_sum<Firsts, Seconds>([](auto i, auto j) {
    Tiles::multiply<sums_of(i, j), 4 + decltype(i)::value, 6 + decltype(j)::value>();
  });
}

/// Selects the variant for two tiles or one of each operand.
template <class Way>
Way way_of(bool two_firsts, bool two_seconds, Way two_two, Way two_one, Way one_two, Way one_one) {
  return two_firsts ? two_seconds ? two_two : two_one : two_seconds ? one_two : one_one;
}

}  // namespace
}  // namespace qload::cpu
