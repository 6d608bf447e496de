// Runs a plan on groups of eight registers: each step combines only registers of the same group.
//
// Eight registers are loaded, pass all steps and are stored, without a store to the cache between steps. If the
// steps combine registers by four bits of their numbers or more, they need the whole tile: see network.h.
#pragma once

#include <cstdint>

#include "plan.h"
#include "vector_scalar.h"
#include "walk.h"

namespace qload::cpu {
namespace {

constexpr int kEight = 8;
constexpr int kEightBits = 3;

// `number` with a 0 inserted as bit `bit`.
constexpr int open_at(int number, int bit) {
  const int below = (1 << bit) - 1;
  return (number & ~below) << 1 | (number & below);
}

// Addresses for the loads and stores of a tile's registers, eight after eight. For each exchange, `bit` is the bit of
// a register's number within its eight by which the exchange pairs registers.
struct Eights {
  int64_t from[kMostRegisters], to[kMostRegisters];  // bytes
  int bit[kMostSteps];

  /// Computes the order. False if one of the first `steps` steps combines registers of different eights, or if the plan
  /// has fewer than eight registers.
  bool made(const Plan& plan, int steps) {
    int bits[kEightBits], found = 0;
    for (int s = 0; s < steps; ++s) {
      if (plan.step[s].kind != Step::kExchange) continue;
      bit[s] = place(plan.step[s].reg, bits, found);
      if (bit[s] == kEightBits) return false;
      if (bit[s] == found) bits[found++] = plan.step[s].reg;
    }
    if (plan.registers < kEight) return false;
    for (int other = 0; found < kEightBits; ++other)
      if (place(other, bits, found) == found) bits[found++] = other;
    arrange(plan, bits);
    return true;
  }

 private:
  static int place(int bit, const int* bits, int found) {
    int at = 0;
    while (at < found && bits[at] != bit) ++at;
    return at;
  }

  void arrange(const Plan& plan, const int* bits) {
    int64_t goes[kMostRegisters];
    for (int i = 0; i < plan.registers; ++i) goes[plan.last[i]] = plan.to[i];
    for (int i = 0; i < plan.registers; ++i) {
      int number = i / kEight;
      for (int reg = 0; 1 << reg < plan.registers; ++reg) {  // lowest bit first
        const int at = place(reg, bits, kEightBits);
        if (at < kEightBits) number = open_at(number, reg) | (i >> at & 1) << reg;
      }
      from[i] = plan.from[number];
      to[i] = goes[number];
    }
  }
};

template <class V, int Bit, int Position>
[[gnu::always_inline]] inline void exchange_in_eight(typename V::T (&r)[kEight]) {
  if constexpr (Position < V::kPositions) {
    constexpr int apart = 1 << Bit, a = open_at(0, Bit), b = open_at(1, Bit), c = open_at(2, Bit), d = open_at(3, Bit);
    V::template exchange<Position>(r[a], r[a + apart], r[a], r[a + apart]);
    V::template exchange<Position>(r[b], r[b + apart], r[b], r[b + apart]);
    V::template exchange<Position>(r[c], r[c + apart], r[c], r[c + apart]);
    V::template exchange<Position>(r[d], r[d + apart], r[d], r[d + apart]);
  }
}

template <class V, int Bit>
[[gnu::always_inline]] inline void exchange_in_eight(typename V::T (&r)[kEight], int position) {
  switch (position) {
    case 1: return exchange_in_eight<V, Bit, 1>(r);
    case 2: return exchange_in_eight<V, Bit, 2>(r);
    case 3: return exchange_in_eight<V, Bit, 3>(r);
    case 4: return exchange_in_eight<V, Bit, 4>(r);
    case 5: return exchange_in_eight<V, Bit, 5>(r);
    case 6: return exchange_in_eight<V, Bit, 6>(r);
    case 7: return exchange_in_eight<V, Bit, 7>(r);
    case 8: return exchange_in_eight<V, Bit, 8>(r);
  }
}

// Calls `work` for each of eight registers, with its number as a constant.
template <class V, class Work>
[[gnu::always_inline]] inline void each_of_eight(typename V::T (&r)[kEight], const Work& work) {
  r[0] = work(r[0]), r[1] = work(r[1]), r[2] = work(r[2]), r[3] = work(r[3]);
  r[4] = work(r[4]), r[5] = work(r[5]), r[6] = work(r[6]), r[7] = work(r[7]);
}

template <class V>
[[gnu::always_inline]] inline void step_of_eight(const Plan& plan, const Step& step, int bit,
                                                 typename V::T (&r)[kEight]) {
  using T = typename V::T;
  if (step.kind == Step::kSwap) {
    const int distance = (1 << step.high) - (1 << step.low);
    const uint64_t mask = ~kBelow[step.low] & kBelow[step.high];
    return each_of_eight<V>(r, [&](T value) { return V::swap(value, distance, mask); });
  }
  if (step.kind == Step::kPermute) {
    const typename V::Table table(plan.shuffle[step.table]);
    return each_of_eight<V>(r, [&](T value) { return table.apply(value); });
  }
  if (bit == 0) return exchange_in_eight<V, 0>(r, step.low);
  if (bit == 1) return exchange_in_eight<V, 1>(r, step.low);
  exchange_in_eight<V, 2>(r, step.low);
}

template <class V>
[[gnu::always_inline]] inline void load_eight(const uint8_t* from, const int64_t* at, typename V::T (&r)[kEight]) {
  r[0] = V::load(from + at[0]), r[1] = V::load(from + at[1]), r[2] = V::load(from + at[2]);
  r[3] = V::load(from + at[3]), r[4] = V::load(from + at[4]), r[5] = V::load(from + at[5]);
  r[6] = V::load(from + at[6]), r[7] = V::load(from + at[7]);
}

template <class V>
[[gnu::always_inline]] inline void store_eight(uint8_t* to, const int64_t* at, const typename V::T (&r)[kEight]) {
  V::store(to + at[0], r[0]), V::store(to + at[1], r[1]), V::store(to + at[2], r[2]), V::store(to + at[3], r[3]);
  V::store(to + at[4], r[4]), V::store(to + at[5], r[5]), V::store(to + at[6], r[6]), V::store(to + at[7], r[7]);
}

template <class V>
[[gnu::always_inline]] inline void stream_eight(uint8_t* to, const int64_t* at, const typename V::T (&r)[kEight]) {
  V::stream(to + at[0], r[0]), V::stream(to + at[1], r[1]), V::stream(to + at[2], r[2]), V::stream(to + at[3], r[3]);
  V::stream(to + at[4], r[4]), V::stream(to + at[5], r[5]), V::stream(to + at[6], r[6]), V::stream(to + at[7], r[7]);
}

/// Runs all steps on the tiles [begin, end) of a plan; `last` is a shuffle before the stores.
template <class V, class Table>
void run_eights(const Plan& plan, const Eights& eights, int steps, const Table& last, const uint8_t* from,
                uint8_t* to, int64_t begin, int64_t end, bool stream) {
  using T = typename V::T;
  Walk walk(plan.loop, plan.loops, begin);
  for (int64_t count = begin; count < end; ++count) {
    const uint8_t* const source = from + walk.from();
    uint8_t* const target = to + walk.to();
    walk.next();
    const uint8_t* const following = count + 1 < end ? from + walk.from() : source;
    for (int first = 0; first < plan.registers; first += kEight) {
      T r[kEight];
      load_eight<V>(source, eights.from + first, r);
      for (int i = 0; i < kEight; ++i) V::prefetch(following + eights.from[first + i]);
      for (int s = 0; s < steps; ++s) step_of_eight<V>(plan, plan.step[s], eights.bit[s], r);
      each_of_eight<V>(r, [&](T value) { return last.apply(value); });
      if (stream)
        stream_eight<V>(target, eights.to + first, r);
      else
        store_eight<V>(target, eights.to + first, r);
    }
  }
}

}  // namespace
}  // namespace qload::cpu
