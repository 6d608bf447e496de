// Runs a plan: loads the registers of a tile, applies the steps, stores them.
//
//   in   from  bytes, read in whole registers at `plan.from`, any alignment
//   in   from  bytes, read in whole registers at `plan.from`, any alignment
//   out  to    bytes, written in whole registers at `plan.to`; `stream` needs each aligned
//
// Between two steps a tile is in the first-level cache (at most 16 KiB, mostly 2), or in registers (eights.h). So a
// vector_*.h. Each instruction set compiles this file into its own unnamed namespace: inlined code must never be
// shared with code for machines of fewer instructions.
// never be shared with code for older machines.
//
// Equals Order.apply, Packing.pack of Packing.unpack and their inverses (qload/layouts), bit for bit.
#pragma once

#include <cstdint>
#include <type_traits>

#include "eights.h"
#include "plan.h"
#include "vector_scalar.h"
#include "walk.h"

namespace qload::cpu {
namespace {

// A step reads registers from `in(i)`, memory or the tile itself, and leaves them in the tile.
template <class V, int Position, class In>
void exchange(typename V::T* tile, const In& in, int registers, int reg) {
  const int apart = 1 << reg;
  for (int count = 0; count < registers / 2; ++count) {
    const int i = open_at(count, reg);
    const typename V::T a = in(i), b = in(i + apart);
    V::template exchange<Position>(a, b, tile[i], tile[i + apart]);
  }
}

// Two exchanges of different positions and registers at once, with half of the loads and stores.
template <class V, int First, int Second, class In>
void exchange_two(typename V::T* tile, const In& in, int registers, int first, int second) {
  const int one = 1 << first, two = 1 << second;
  const int lower = first < second ? first : second, upper = first < second ? second : first;
  for (int count = 0; count < registers / 4; ++count) {
    const int i = open_at(open_at(count, lower), upper);
    const typename V::T a = in(i), b = in(i + one), c = in(i + two), d = in(i + one + two);
    typename V::T e, f, g, h;
    V::template exchange<First>(a, b, e, f);
    V::template exchange<First>(c, d, g, h);
    V::template exchange<Second>(e, g, tile[i], tile[i + two]);
    V::template exchange<Second>(f, h, tile[i + one], tile[i + one + two]);
  }
}

template <class V, class In>
void swap(typename V::T* tile, const In& in, int registers, int low, int high) {
  const int distance = (1 << high) - (1 << low);
  const uint64_t mask = ~kBelow[low] & kBelow[high];
  for (int i = 0; i < registers; ++i) tile[i] = V::swap(in(i), distance, mask);
}

template <class V, class In>
void permute(typename V::T* tile, const In& in, int registers, const Shuffle& shuffle) {
  const typename V::Table table(shuffle);
  for (int i = 0; i < registers; ++i) tile[i] = table.apply(in(i));
}

// Calls `work` with a step's position, one of [1, V::kPositions), as a constant.
template <class V, int Position, class Work>
void at_position(int position, const Work& work) {
  if constexpr (Position < V::kPositions) {
    if (position == Position) return work(std::integral_constant<int, Position>{});
    at_position<V, Position + 1>(position, work);
  }
}

bool go_together(const Step& first, const Step& second) {
  return first.kind == Step::kExchange && second.kind == Step::kExchange && first.reg != second.reg &&
         first.low != second.low;
}

// Runs step `s` of a plan, and the next one too if both can be fused; returns the number of steps.
template <class V, class In>
int step(const Plan& plan, int s, int count, typename V::T* tile, const In& in) {
  const int registers = plan.registers;
  const Step &one = plan.step[s], &two = plan.step[s + 1 < count ? s + 1 : s];
  if (one.kind == Step::kSwap) return swap<V>(tile, in, registers, one.low, one.high), 1;
  if (one.kind == Step::kPermute) return permute<V>(tile, in, registers, plan.shuffle[one.table]), 1;
  const bool both = go_together(one, two);
  at_position<V, 1>(one.low, [&](auto first) {
    if (!both) return exchange<V, first>(tile, in, registers, one.reg);
    at_position<V, 1>(two.low, [&](auto second) {
      exchange_two<V, first, second>(tile, in, registers, one.reg, two.reg);
    });
  });
  return both ? 2 : 1;
}

struct AsItIs {
  template <class T>
  T apply(T value) const {
    return value;
  }
};

template <class V, class Table>
void store(const Plan& plan, const typename V::T* tile, uint8_t* to, bool stream, const Table& table) {
  if (stream)
    for (int reg = 0; reg < plan.registers; ++reg) V::stream(to + plan.to[reg], table.apply(tile[plan.last[reg]]));
  else
    for (int reg = 0; reg < plan.registers; ++reg) V::store(to + plan.to[reg], table.apply(tile[plan.last[reg]]));
}

/// Runs the tiles [begin, end) of a plan.
template <class V>
void run(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream) {
  alignas(64) typename V::T tile[kMostRegisters];
  // A final shuffle is fused with the stores.
  const bool shuffled = plan.steps > 0 && plan.step[plan.steps - 1].kind == Step::kPermute;
  const typename V::Table last(plan.shuffle[shuffled ? plan.step[plan.steps - 1].table : 0]);
  const int steps = plan.steps - (shuffled ? 1 : 0);
  Eights eights;
  if (eights.made(plan, steps)) {
    if (shuffled) return run_eights<V>(plan, eights, steps, last, from, to, begin, end, stream);
    return run_eights<V>(plan, eights, steps, AsItIs{}, from, to, begin, end, stream);
  }
  Walk walk(plan.loop, plan.loops, begin);
  for (int64_t count = begin; count < end; ++count) {
    const uint8_t* const source = from + walk.from();
    uint8_t* const target = to + walk.to();
    walk.next();
    if (count + 1 < end)  // prefetches the next tile
      for (int reg = 0; reg < plan.registers; ++reg) V::prefetch(from + walk.from() + plan.from[reg]);
    const auto loaded = [&](int reg) { return V::load(source + plan.from[reg]); };
    const auto kept = [&](int reg) { return tile[reg]; };
    int done = 0;
    if (steps > 0)
      done = step<V>(plan, 0, steps, tile, loaded);
    else
      for (int reg = 0; reg < plan.registers; ++reg) tile[reg] = loaded(reg);
    while (done < steps) done += step<V>(plan, done, steps, tile, kept);
    if (shuffled)
      store<V>(plan, tile, target, stream, last);
    else
      store<V>(plan, tile, target, stream, AsItIs{});
  }
}

}  // namespace
}  // namespace qload::cpu
