// A warp's part of the product where operands are scaled: 4 bits in our own order, zero points all the same.
//
// For 17 tokens and more: to scale operands takes more instructions than to scale sums, but fewer registers, and a
// multiprocessor has 12 warps instead of 8. Operands are rounded to T, as those of `many` are.
#pragma once

#include "../device/symmetric.cuh"
#include "inputs.cuh"
#include "operands.cuh"
#include "stream.cuh"

namespace qload::cuda {

/// sum += what a warp has of x times the weight.
template <class T, int token_tiles, int held, int kept>
__device__ __forceinline__ void multiply_scaled(const Chunks& work, const Part& part_of_warp,
                                                Words<4, Order::kOwn, kept>& stream, Scales<T, 4>& scales,
                                                Inputs<T, token_tiles, Order::kOwn, held>& inputs,
                                                float (&sum)[4][token_tiles][4]) {
  const auto [tile, start, last, row_warps, busy] = part_of_warp;
  auto& sums = reinterpret_cast<float(&)[4][token_tiles * 4]>(sum);
  Symmetric<T, 4> at[4];
  for (int chunk = start; busy && chunk < last; chunk += row_warps) {
    const bool more = chunk + row_warps < last;
    uint32_t stored[4], words[4][4];
    scales.enter(work.chunk_step);
    scales.pairs(stored);
    if (chunk == start)
      begin(at, stored);
    else
      enter(at, stored, sums, [] {});
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t in[token_tiles][4];
      if (more && step == kSteps - held) inputs.advance((chunk + row_warps) * kChunk, row_warps * kChunk);
      inputs.operands(step, in);
      if (step % 2 == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) stream.take(step * 2 + i, more, words[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t operand[2][4];
#pragma unroll
        for (int p = 0; p < 2; ++p)
          operand_of(words[j][2 * p] >> step % 2 * 8, words[j][2 * p + 1] >> step % 2 * 8, at[j], operand[p]);
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) {
          multiply(sum[j][m], operand[0], in[m][0], in[m][1], T{});
          multiply(sum[j][m], operand[1], in[m][2], in[m][3], T{});
        }
      }
      if (more || step < kSteps - held) inputs.ask_step(step);
    }
  }
  if (busy)
#pragma unroll
    for (int j = 0; j < 4; ++j) at[j].leave(sums[j]);
}

}  // namespace qload::cuda
