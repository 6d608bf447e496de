// A warp's part of the product where operands are scaled: 4 bits in our own order, zero points all the same.
//
// For 9 tokens and more: there are no registers of sums that are yet to be scaled, so that a multiprocessor has more
// warps. Operands are rounded to T, as those of `many` are.
#pragma once

#include "../device/one_power.cuh"
#include "inputs.cuh"
#include "operands.cuh"
#include "stream.cuh"

namespace qload::cuda {

/// sum += what a warp has of x times the weight. False: scales differ too much for that, and sums are wrong.
template <class T, int token_tiles, int held, int kept>
__device__ __forceinline__ bool multiply_scaled(const Chunks& work, const Part& part,
                                                Words<4, Order::kOwn, kept>& stream, Scales<T, 4>& scales,
                                                Inputs<T, token_tiles, Order::kOwn, held>& inputs,
                                                float (&sum)[4][token_tiles][4]) {
  auto& sums = reinterpret_cast<float(&)[16 * token_tiles]>(sum);
  if (!part.busy) return true;
  OnePower<T> power;
  bool fits = true;
  uint32_t stored[4], words[4][4], in[token_tiles][4];
  for (int chunk = part.first; chunk < part.last; chunk += part.turn) {
    const bool more = chunk + part.turn < part.last;
    const auto fetch = [&](int step) {
      if (more && step == kSteps - held) inputs.advance((chunk + part.turn) * kChunk, part.turn * kChunk);
      inputs.operands(step, in);
      if (more || step < kSteps - held) inputs.ask_step(step);
      if (step % 2 == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) stream.take(step * 2 + i, more, words[i]);
    };
    fetch(0);
    Symmetric<T, 4> at[4];
    scales.enter(work.chunk_step);
    scales.pairs(stored);
    if (chunk == part.first) power.begin(stored);
    if (__any_sync(~0u, !power.enter(stored, at))) fits &= power.move(stored, at, sums);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step > 0) fetch(step);
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
    }
  }
#pragma unroll
  for (int i = 0; i < 16 * token_tiles; ++i) sums[i] *= power.unit();
  return fits;
}

}  // namespace qload::cuda
