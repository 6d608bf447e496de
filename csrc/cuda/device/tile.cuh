// A tile of packed elements in registers and in shared memory, common to all kernels over packed elements.
#pragma once

#include <cstdint>

#include "../move/bank.h"
#include "../move/plan.h"

namespace qload::cuda {

constexpr int kThreads = 1 << kThreadBits;

/// Sum of the strides of the bits set in a number.
template <class Stride>
__device__ __forceinline__ Stride along(const Stride* strides, int bits, int number) {
  Stride sum = 0;
#pragma unroll
  for (int bit = 0; bit < kThreadBits; ++bit)
    if (bit < bits && (number >> bit & 1)) sum += strides[bit];
  return sum;
}

struct Start {
  int64_t from, to, row;
};

/// Start of this block's tile, in units and rows.
__device__ __forceinline__ Start start_of(const Plan& plan, uint32_t block) {
  Start start{0, 0, 0};
  for (int i = 0; i < plan.loops; ++i) {
    const Loop& loop = plan.loop[i];
    const uint32_t rest = __umulhi(block, loop.factor) >> loop.shift, at = block - rest * loop.size;
    start.from += at * loop.from;
    start.to += at * loop.to;
    start.row += at * loop.row;
    block = rest;
  }
  return start;
}

template <int bit, int register_bits>
__device__ __forceinline__ void exchange(const Step& step, uint32_t (&units)[1 << register_bits]) {
  if constexpr (bit < register_bits) {
    if (step.reg != bit) return exchange<bit + 1, register_bits>(step, units);  // an index must be known at compile time
#pragma unroll
    for (int i = 0; i < 1 << (register_bits - 1); ++i) {
      const int low = (i >> bit << (bit + 1)) | (i & ((1 << bit) - 1)), high = low | 1 << bit;
      const uint32_t moved = (units[low] >> step.shift ^ units[high]) & step.mask;
      units[high] ^= moved;
      units[low] ^= moved << step.shift;
    }
  }
}

/// Apply one step of the plan to all registers of a thread; all threads take the same step.
template <int register_bits>
__device__ __forceinline__ void apply(const Step& step, uint32_t (&units)[1 << register_bits]) {
  if (step.reg >= 0) return exchange<0, register_bits>(step, units);
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i) {
    const uint32_t moved = (units[i] >> step.shift ^ units[i]) & step.mask;
    units[i] ^= moved ^ moved << step.shift;
  }
}

/// Load a thread's units.
template <int register_bits, class Unit>
__device__ __forceinline__ void load(const Plan& plan, const Unit* __restrict__ from,
                                     uint32_t (&units)[1 << register_bits]) {
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i)
    units[i] = i >> plan.register_bits ? 0 : static_cast<uint32_t>(__ldg(from + plan.from_register[i]));
}

template <int register_bits>
__device__ __forceinline__ void settle(const Plan& plan, uint32_t (&units)[1 << register_bits]) {
  for (int i = 0; i < plan.steps; ++i) apply<register_bits>(plan.step[i], units);
}

/// Store all units of the block in shared memory, in the order of `to`.
template <int register_bits, int run_bits, class Unit>
__device__ __forceinline__ void share(const Plan& plan, const uint32_t (&units)[1 << register_bits], Unit* shared) {
  const int own = bank<run_bits>(along(plan.place_thread, plan.thread_bits, threadIdx.x));
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i)
    if (!(i >> plan.register_bits)) shared[own ^ bank<run_bits>(plan.place_register[i])] = static_cast<Unit>(units[i]);
}

}  // namespace qload::cuda
