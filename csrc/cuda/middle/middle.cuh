// x times a weight of 4 or 8 bits in Marlin's order, for 17 tokens and more, on Hopper.
//
//   y[m, n] = sum over k of x[m, k] * round(scale[g, n] * (code[k, n] - zero[g, n]))  + bias[n],   g = k / group
//
//   in   see middle.h, through the boxes of ring.cuh; x swizzled by 128 bytes
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32
//
//   needs    K, N in multiples of 64; groups of 32, 64, 128, or one; a ring of at least two stages
//   grid     (split, M / tokens, N / columns), 384 threads; blocks of a row of the grid are a cluster: they share K
//   Weights are the 64-row operand of wgmma, in registers, tokens its columns: y^T = w^T x^T. Any 64 columns of w may
//   be those rows, so a warp takes strips of 16 columns of a tile of its own, and the words of a lane are its part of
//   the operand of as many products. Eight warps multiply, two groups of four: words become operands in their
//   registers while the products before are under way. One thread of four more fills a ring with x and weights.
//   At the end each block of a cluster gets its share of the sums from all others and adds them in their order.
//   Weights are asked for before the kernel ahead has ended: only x may depend on it.
//   Memory is the limit up to 64 tokens, the matrix unit above.
//
// Equals x @ GPTQMarlinWeight.dequantize().T (qload/kernels/marlin.py), the weight rounded to the type of x, up to the
// rounding of fp32 sums.
#pragma once

#include "../device/wgmma.cuh"
#include "middle.h"
#include "operands.cuh"
#include "ring.cuh"
#include "sums.cuh"

namespace qload::cuda::middle_room {

/// `depth`: steps that have operands in registers, two or all of a stage. `together`: blocks of a multiprocessor.
template <class T, int bits, bool has_zeros, int tokens, int strips, int depth, int together>
__global__ void __launch_bounds__(kMultiply + kFill, together)
middle_kernel(const __grid_constant__ Matrices from, const __grid_constant__ Middle call,
              const __grid_constant__ Work work) {
  constexpr int quads = strips / 2, warps = kMultiply / 32;
  constexpr int words = bits / 4;  // of a lane's part of a strip
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];

  const int all = call.K / kStage;
  const int first = all * blockIdx.x / work.split, last = all * (blockIdx.x + 1) / work.split;
  let_dependents_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < work.stages; ++i) {
      start_barrier(full + i, 1);
      start_barrier(empty + i, warps);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kMultiply) {
    give_registers<24>();
    if (threadIdx.x == kMultiply)
      Filling<bits, tokens, quads>{from, work, memory, full, first, static_cast<int>(blockIdx.y) * tokens,
                                   gridDim.y == 1 ? leaves_first() : stays()}
          .all(last, empty);
    return;
  }

  take_registers<together == 1 ? 240 : 104>();
  const Place<strips> place;
  const bool grouped = work.group < call.K;
  const int inside = grouped ? work.group / 16 - 1 : -1;  // bits of a step's number: none is set where a group begins
  float sum[strips][tokens / 2] = {};
  Columns at[strips];
  uint32_t operand[depth][strips][4];
  int slot = 0, parity = 0, before = 0;
  for (int stage = first; stage < last; ++stage) {
    const unsigned char* here = memory + slot * work.stage_bytes;
    wait_for_bytes(full + slot, parity);
    const uint64_t rows = described(here);
    const unsigned char* box = here + tokens * kStage * 2 + place.quad * kBoxBytes<bits>;
    uint32_t word[kSteps][strips][words];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {  // a row of a box has four tiles of 4 bits, or two of 8
      const int tile = bits == 4 ? (step * kQuad + place.tile) * 512
                                 : place.tile / 2 * kBoxBytes<4> + (step * 2 + place.tile % 2) * 1024;
      const auto lane = reinterpret_cast<const uint32_t*>(box + tile) + place.lane * bits + place.first_strip * words;
      memcpy(word[step], __builtin_assume_aligned(lane, strips * words == 2 ? 8 : 16), sizeof word[step]);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if ((step % 2 == 0 && !((stage * kSteps + step) & inside)) || (step == 0 && stage == first)) {
        const int row = place.quad * work.group_rows + (step != 0);
        const T* scales = reinterpret_cast<const T*>(here + work.scales_at) + (row * kQuad + place.tile) * kTile;
        const uint32_t* zeros =
            reinterpret_cast<const uint32_t*>(here + work.zeros_at) + (row * kQuad + place.tile) * 2 * bits;
        enter_group<T, bits, has_zeros>(scales, zeros, place.first_strip, place.lane / 4, grouped, at);
      }
      auto& own = operand[step % depth];
#pragma unroll
      for (int j = 0; j < strips; ++j) operand_of<T, has_zeros>(word[step][j], at[j], own[j]);
      fence_products();
#pragma unroll
      for (int j = 0; j < strips; ++j) multiply_async(sum[j], own[j], rows + 2 * step, T{});
      group_products();
      if constexpr (depth == kSteps) {
        if (step == kSteps - 1) wait_for_products<0>();
      } else {
        wait_for_products<1>();
      }
      if (step == 1 && stage > first && place.lane == 0) arrive(empty + before);  // its products are done
    }
    before = slot;
    if (++slot == work.stages) slot = 0, parity ^= 1;
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
