// Move elements between two packed orders.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]
//
//   in   from   elements of 2, 4, 8, 16 or 32 bits, packed
//        rows   int64 (R,)  for `gather`: start of row r in `from`, in elements
//   out  to     as many, packed in the other order; bits outside of all digits do not change
//
//   needs    a plan (plan.h); `move_elements` needs none
//   grid     plan.blocks, 2**plan.thread_bits threads; a block has a tile of up to 2**13 units
//   A thread loads units, exchanges their elements in registers, and stores them in shared memory; from there the block
//   stores them in the order of `to`. Memory is the limit: about 20 instructions per unit.
//
// Equals Packing.pack(Packing.unpack(...)) of the two orders (qload/layouts/packing.py), bit for bit.
#pragma once

#include <cstdint>

#include "../../shared/element.h"
#include "../../shared/loops.h"
#include "../device/tile.cuh"

namespace qload::cuda {

/// Store the block's units through shared memory, up to 16 bytes at a time.
template <int register_bits, bool runs, class Unit>
__device__ __forceinline__ void put_in_order(const Plan& plan, const uint32_t (&units)[1 << register_bits], Unit* shared,
                                             Unit* __restrict__ to) {
  constexpr int run_bits = runs ? 2 : 0;
  share<register_bits, run_bits>(plan, units, shared);
  __syncthreads();
  constexpr int stores = (1 << register_bits) >> run_bits;
  const int thread = threadIdx.x, places = 1 << (plan.thread_bits + plan.register_bits);
  const int32_t own = along(plan.to_bit + run_bits, plan.thread_bits, thread);
#pragma unroll
  for (int i = 0; i < stores; ++i) {
    const int place = (thread + (i << plan.thread_bits)) << run_bits;
    if (place >= places) break;
    int32_t target = own;
#pragma unroll
    for (int bit = 0; 1 << bit < stores; ++bit)
      if (i >> bit & 1) target += plan.to_bit[run_bits + plan.thread_bits + bit];
    const Unit* source = shared + bank<run_bits>(place);
    if constexpr (runs)
      *reinterpret_cast<uint4*>(to + target) = *reinterpret_cast<const uint4*>(source);
    else
      to[target] = *source;
  }
}

template <int register_bits, bool runs, class Unit>
__global__ void __launch_bounds__(kThreads)
move_tiles(const __grid_constant__ Plan plan, const Unit* __restrict__ from, Unit* __restrict__ to) {
  __shared__ __align__(16) Unit shared[kThreads << register_bits];
  const Start start = start_of(plan, blockIdx.x);
  uint32_t units[1 << register_bits];
  load<register_bits>(plan, from + start.from + along(plan.from_thread, plan.thread_bits, threadIdx.x), units);
  settle<register_bits>(plan, units);
  put_in_order<register_bits, runs>(plan, units, shared, to + start.to);
}

/// `move_tiles` for rows in any order, if every unit is of one row.
template <int register_bits, bool runs>
__global__ void __launch_bounds__(kThreads)
gather_units(const __grid_constant__ Plan plan, const __grid_constant__ Look look, int bits, int per_unit_bits,
             const uint32_t* __restrict__ from, const int64_t* __restrict__ rows, uint32_t* __restrict__ to) {
  __shared__ __align__(16) uint32_t shared[kThreads << register_bits];
  const Start start = start_of(plan, blockIdx.x);
  from += start.from + along(look.from_thread, plan.thread_bits, threadIdx.x);
  rows += start.row + along(look.row_thread, plan.thread_bits, threadIdx.x);
  uint32_t units[1 << register_bits];
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i) {
    units[i] = 0;
    if (i >> plan.register_bits) continue;
    const int64_t row = __ldg(rows + look.row_register[i]);
    const uint32_t* at = from + look.from_register[i] + (row >> per_unit_bits);
    const int inside = static_cast<int>(row) & ((1 << per_unit_bits) - 1);
    units[i] = __ldg(at);
    if (inside) units[i] = __funnelshift_r(units[i], __ldg(at + 1), inside * bits);  // a row starts within a unit
  }
  settle<register_bits>(plan, units);
  put_in_order<register_bits, runs>(plan, units, shared, to + start.to);
}

/// `move_tiles` for rows in any order: a thread looks up each element of its units.
template <int register_bits, bool runs>
__global__ void __launch_bounds__(kThreads)
gather_tiles(const __grid_constant__ Plan plan, const __grid_constant__ Look look, int bits,
             const uint32_t* __restrict__ from, const int64_t* __restrict__ rows, uint32_t* __restrict__ to) {
  __shared__ __align__(16) uint32_t shared[kThreads << register_bits];
  const Start start = start_of(plan, blockIdx.x);
  const int per_unit = 32 / bits, thread = threadIdx.x;
  const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
  int64_t own = start.from * per_unit, row = start.row;
  for (int bit = 0; bit < plan.thread_bits; ++bit)
    if (thread >> bit & 1) own += look.from_thread[bit], row += look.row_thread[bit];
  uint32_t units[1 << register_bits];
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i) {
    units[i] = 0;
    if (i >> plan.register_bits) continue;
    for (int e = 0; e < per_unit; ++e) {
      const int64_t source = own + look.from_register[i] + look.from_element[e] +
                             rows[row + look.row_register[i] + look.row_element[e]];
      units[i] |= (__ldg(from + source / per_unit) >> (source % per_unit * bits) & mask) << (e * bits);
    }
  }
  put_in_order<register_bits, runs>(plan, units, shared, to + start.to);
}

struct Digits {
  int count;
  Digit digit[kMostLoops + 2];  // innermost of `to` first
};

/// Move element by element. Threads exchange fields of a shared word by atomics: slow, but right for all strides; `to`
/// starts at a whole word.
__global__ void __launch_bounds__(kThreads)
move_elements(const __grid_constant__ Digits digits, int bits, int64_t count, const void* __restrict__ from,
              const int64_t* __restrict__ rows, void* __restrict__ to) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += gridDim.x * int64_t{kThreads}) {
    const Offsets at = offsets_of(digits.digit, digits.count, i);
    const int64_t source = at.from + (rows ? rows[at.row] : 0);
    if (copy_element(bits, from, source, to, at.to)) continue;
    const int per_word = 32 / bits, shift = static_cast<int>(at.to % per_word) * bits;
    uint32_t* word = static_cast<uint32_t*>(to) + at.to / per_word;
    atomicAnd(word, ~(((1u << bits) - 1) << shift));
    atomicOr(word, code_at(bits, from, source) << shift);
  }
}

}  // namespace qload::cuda
