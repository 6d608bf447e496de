// x times a weight of 4 or 8 bits in Marlin's order, from 17 tokens on, on Hopper.
//
//   y[m, n] = sum over k of x[m, k] * round(scale[g, n] * (code[k, n] - zero[g, n]))  + bias[n],   g = k / group
//
//   in   see middle.h, through the boxes of ring.cuh; x swizzled by 128 bytes
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32
//
//   needs    K, N in multiples of 64; groups of 32, 64, 128, or one; a ring of two stages
//   grid     (split, M / tokens, N / columns), 384 threads; blocks of a row of the grid are a cluster: they share K
//   Weights are the 64-row operand of wgmma, in registers, tokens its columns: y^T = w^T x^T. Any 64 columns of w may
//   be those rows, so a warp takes strips of 16 columns of a tile of its own, and the words of a lane are its part of
//   the operand of as many products. Eight warps multiply, two groups of four: words become operands in their
//   registers while the products before are under way. Of four more one thread fills a ring with weights, one with x.
//   At the end each block of a cluster gets its share of the sums from all others and adds them in their order.
//   Weights are asked for before the kernel ahead has ended: only x may depend on it.
//   What the L2 gives a multiprocessor, and products that wait, are the limit up to 64 tokens, the matrix unit above.
//
// Equals x @ GPTQMarlinWeight.dequantize().T (qload/kernel_formats/marlin.py), the weight rounded to the type of x, up to the
// rounding of fp32 sums.
#pragma once

#include "../device/wgmma.cuh"
#include "lane.cuh"
#include "middle.h"
#include "sums.cuh"

namespace qload::cuda::middle_room {

/// `together`: blocks of a multiprocessor.
template <class T, int bits, bool has_zeros, int tokens, int strips, int together>
__global__ void __launch_bounds__(kMultiply + kFill, together)
middle_kernel(const __grid_constant__ Matrices from, const __grid_constant__ Middle call,
              const __grid_constant__ Work work) {
  constexpr int quads = strips / 2, warps = kMultiply / 32;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];

  let_dependents_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < work.stages; ++i) {
      start_barrier(full + i, 2);
      start_barrier(empty + i, warps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kMultiply) {
    give_registers<together == 1 ? 40 : 48>();
    const Filling<bits, tokens, quads> filling{from, work, memory, full, empty};
    return fill<kMultiply>(filling);
  }

  take_registers<together == 1 ? 232 : 96>();
  const int first = first_of(work), last = last_of(work);
  const Place<strips> place;
  const Lane<bits, strips> lane(place, work, tokens * kStage * 2);
  const bool grouped = work.group < call.K;
  const int inside = grouped ? work.group / 16 - 1 : -1;  // bits of a step's number: none is set where a group begins
  const auto enters = [&](int stage, int step) { return !((stage * kSteps + step) & inside); };
  typename Lane<bits, strips>::Words word[kSteps];
  Group<bits, strips> next;
  Columns at[strips];
  float sum[strips][tokens / 2] = {};
  uint32_t operand[2][strips][4];
  const unsigned char* here = memory;
  int slot = 0, parity = 0, before = 0;
  const auto load = [&](int first_step, int steps) {
#pragma unroll
    for (int i = 0; i < steps; ++i) lane.words(here, first_step + i, word[first_step + i]);
  };
  wait_for(full, 0);
  if (grouped)
    lane.template group<has_zeros>(here, 0, next);
  else
    lane.template whole<has_zeros>(here, next);
  lane.template enter<T, has_zeros>(next, at);
  load(0, kSteps);

  for (int stage = first; stage < last; ++stage) {
    const uint64_t rows = described(here);
    const bool more = stage + 1 < last;
    const int now = slot;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step % 2 == 0 && enters(stage, step)) lane.template enter<T, has_zeros>(next, at);
#pragma unroll
      for (int j = 0; j < strips; ++j) operand_of<T, has_zeros>(word[step][j], at[j], operand[step % 2][j]);
      fence_products();
#pragma unroll
      for (int j = 0; j < strips; ++j) multiply_async(sum[j], operand[step % 2][j], rows + 2 * step, T{});
      group_products();
      // What comes next is loaded while products are under way.
      if (step == 0 && enters(stage, 2)) lane.template group<has_zeros>(here, 1, next);
      if (step == kSteps / 2) {
        if (++slot == work.stages) slot = 0, parity ^= 1;
        here = memory + slot * work.stage_bytes;
        if (more) wait_for(full + slot, parity);
        if (more && enters(stage + 1, 0)) lane.template group<has_zeros>(here, 0, next);
      }
      if (more && step >= kSteps / 2) load(2 * step - kSteps, 2);
      wait_for_products<1>();
      if (step == 0 && stage > first && place.lane == 0) arrive(empty + before);  // its products are done
    }
    before = now;
  }
  wait_for_products<0>();

  barrier_of<kMultiply>();  // the ring is free
  if (work.split == 1)
    store<T, tokens, strips, quads * kQuad * kTile>(call, place, reinterpret_cast<T*>(memory), sum);
  else
    store_share<T, tokens, strips, quads * kQuad * kTile>(call, work.split, place, reinterpret_cast<float4*>(memory),
                                                          sum);
}

}  // namespace qload::cuda::middle_room
