// A warp's part of the product with scaled operands: 4 bits in strips with equal zero points.
//
// For 9 tokens and more. Without registers for unscaled sums, a multiprocessor has more warps, or a warp more tokens.
// Operands are rounded to T, as in `many`.
#pragma once

#include "../device/one_power.cuh"
#include "inputs.cuh"
#include "operands.cuh"
#include "stream.cuh"

namespace qload::cuda {

/// x of a step from registers, while the next step is loaded. `row`: of the warp's next chunk, `rows` after this one.
template <class T, int token_tiles>
__device__ __forceinline__ const auto& fetch(Inputs<T, token_tiles, Order::kOwn, 1>& inputs, int step, bool more, int row,
                                             int rows, uint32_t (&x)[2][token_tiles][4]) {
  if (more && step == kSteps - 1) inputs.advance(row, rows);
  inputs.operands(step, x[0]);
  if (more || step < kSteps - 1) inputs.load_step(step);
  return x[0];
}

/// The same from shared memory: the next chunk is loaded from the first step on.
template <class T, int token_tiles>
__device__ __forceinline__ const auto& fetch(StagedInputs<T, token_tiles>& inputs, int step, bool more, int row, int,
                                             uint32_t (&x)[2][token_tiles][4]) {
  if (step == 0) {
    inputs.turn();
    inputs.operands(0, x[0]);
    if (more) inputs.start_load(row);
  }
  if (step + 1 < kSteps) inputs.operands(step + 1, x[(step + 1) % 2]);
  return x[step % 2];
}

/// sum += x times a warp's part of the weight; the first loads of all three are in flight. Return false if scales differ
/// too much for scaled operands; the sums are then wrong.
template <class T, int token_tiles, int kept, class OwnInputs>
__device__ __forceinline__ bool multiply_scaled(const Chunks& work, const Part& part,
                                                Words<4, Order::kOwn, kept>& stream, Scales<T, 4>& scales,
                                                OwnInputs& inputs, float (&sum)[4][token_tiles][4]) {
  constexpr bool in_place = Words<4, Order::kOwn, kept>::kInPlace;
  auto& sums = reinterpret_cast<float(&)[16 * token_tiles]>(sum);
  if (!part.busy) return true;
  OnePower<T> power;
  bool fits = true;
  uint32_t stored[4], in[2][token_tiles][4];
  [[maybe_unused]] uint32_t words[4][4];
  for (int chunk = part.first; chunk < part.last; chunk += part.turn) {
    const bool more = chunk + part.turn < part.last;
    const auto fetched = [&](int step) -> const auto& {
      const auto& x = fetch(inputs, step, more, (chunk + part.turn) * kChunk, part.turn * kChunk, in);
      if (!in_place && step % 2 == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) stream.take(step * 2 + i, more, words[i]);
      return x;
    };
    fetched(0);
    Symmetric<T, 4> at[4];
    scales.pairs(stored);
    if (chunk == part.first) power.begin(stored);
    if (__any_sync(~0u, !power.enter(stored, at))) fits &= power.move(stored, at, sums);
    scales.advance(work.chunk_step);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& x = step ? fetched(step) : in[0];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int piece = step / 2 * 4 + j;
        const auto& own = in_place ? stream.piece(piece) : words[j];
        uint32_t operand[2][4];
#pragma unroll
        for (int p = 0; p < 2; ++p)
          operand_of(own[2 * p] >> step % 2 * 8, own[2 * p + 1] >> step % 2 * 8, at[j], operand[p]);
        if (in_place && step % 2 == 1) stream.leave(piece, more);
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) {
          multiply(sum[j][m], operand[0], x[m][0], x[m][1], T{});
          multiply(sum[j][m], operand[1], x[m][2], x[m][3], T{});
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 16 * token_tiles; ++i) sums[i] *= power.unit();
  return fits;
}

}  // namespace qload::cuda
