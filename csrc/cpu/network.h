// Running a plan: load the registers of a tile, take them through the steps, store them.
//
//   in   from  bytes, read in whole registers at `plan.from`, any alignment
//   out  to    bytes, written in whole registers at `plan.to`; `stream` needs each to be aligned
//
// A tile lies in the first-level cache between two steps (at most 16 KiB), so that a plan costs a few
// instructions a register and step, and memory is the limit. `V` is a register: see vector_*.h. Compiled
// once for each instruction set, under the names of that set alone: what is inlined here must never be
// shared with code that runs on lesser machines.
//
// Equals Order.apply, Packing.pack of Packing.unpack and their inverses (qload/layouts), bit for bit.
#pragma once

#include <cstdint>

#include "plan.h"

namespace qload::cpu {
namespace {

template <class V, int Position>
void exchange(typename V::T* tile, int registers, int reg) {
  const int apart = 1 << reg;
  for (int block = 0; block < registers; block += 2 * apart)
    for (int i = block; i < block + apart; ++i) {
      const typename V::T a = tile[i], b = tile[i + apart];
      V::template exchange<Position>(a, b, tile[i], tile[i + apart]);
    }
}

// Two exchanges of different positions and registers at once: half the way to the cache and back.
template <class V, int First, int Second>
void exchange_two(typename V::T* tile, int registers, int first, int second) {
  const int one = 1 << first, two = 1 << second;
  for (int i = 0; i < registers; ++i) {
    if (i & (one | two)) continue;
    typename V::T a = tile[i], b = tile[i + one], c = tile[i + two], d = tile[i + one + two];
    typename V::T e, f, g, h;
    V::template exchange<First>(a, b, e, f);
    V::template exchange<First>(c, d, g, h);
    V::template exchange<Second>(e, g, tile[i], tile[i + two]);
    V::template exchange<Second>(f, h, tile[i + one], tile[i + one + two]);
  }
}

template <class V>
void swap(typename V::T* tile, int registers, int low, int high) {
  const int distance = (1 << high) - (1 << low);
  uint64_t mask = 0;
  for (int bit = 0; bit < 64; ++bit)
    if ((bit >> low & 1) && !(bit >> high & 1)) mask |= uint64_t{1} << bit;
  for (int i = 0; i < registers; ++i) tile[i] = V::swap(tile[i], distance, mask);
}

template <class V>
void permute(typename V::T* tile, int registers, const Shuffle& shuffle) {
  const typename V::Table table(shuffle);
  for (int i = 0; i < registers; ++i) tile[i] = table.apply(tile[i]);
}

template <class V, int First, int Last>
void exchange_at(typename V::T* tile, int registers, const Step& step) {
  if constexpr (First < Last) {
    if (step.low == First) return exchange<V, First>(tile, registers, step.reg);
    exchange_at<V, First + 1, Last>(tile, registers, step);
  }
}

template <class V>
void apply(const Plan& plan, const Step& step, typename V::T* tile) {
  if (step.kind == Step::kExchange) return exchange_at<V, 1, V::kPositions>(tile, plan.registers, step);
  if (step.kind == Step::kSwap) return swap<V>(tile, plan.registers, step.low, step.high);
  permute<V>(tile, plan.registers, plan.shuffle[step.table]);
}

template <class V>
void store(const Plan& plan, const typename V::T* tile, uint8_t* to, bool stream) {
  if (stream)
    for (int reg = 0; reg < plan.registers; ++reg) V::stream(to + plan.to[reg], tile[plan.last[reg]]);
  else
    for (int reg = 0; reg < plan.registers; ++reg) V::store(to + plan.to[reg], tile[plan.last[reg]]);
}

/// The tiles [begin, end) of a plan.
template <class V>
void run(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream) {
  alignas(64) typename V::T tile[kMostRegisters];
  int64_t at[kMostDigits];
  int64_t rest = begin;
  for (int l = plan.loops - 1; l >= 0; --l) {
    at[l] = rest % plan.loop[l].size;
    rest /= plan.loop[l].size;
    from += at[l] * plan.loop[l].from;
    to += at[l] * plan.loop[l].to;
  }
  for (int64_t count = begin; count < end; ++count) {
    for (int reg = 0; reg < plan.registers; ++reg) tile[reg] = V::load(from + plan.from[reg]);
    for (int s = 0; s < plan.steps; ++s) apply<V>(plan, plan.step[s], tile);
    store<V>(plan, tile, to, stream);
    for (int l = plan.loops - 1; l >= 0; --l) {
      const Loop& loop = plan.loop[l];
      from += loop.from;
      to += loop.to;
      if (++at[l] < loop.size) break;
      from -= loop.from * loop.size;
      to -= loop.to * loop.size;
      at[l] = 0;
    }
  }
}

}  // namespace
}  // namespace qload::cpu
