// x times a 4-bit or 8-bit weight in Marlin's order, up to 16 tokens, or in strips, up to 48.
//
//   y[m, n] = sum over k of x[m, perm[k]] * (scale[g, n] * (code[k, n] - zero[g, n]) - offset[g, n])  + bias[n]
//             g = k / group, or g_idx[k]; offsets in strips only; numbers: scale * code
//
//   in   see decode.h; scales and zero points in Marlin's orders
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32
//
//   needs    K, N in multiples of 64, K of 128 for strips; groups of 32, 64, 128 rows, all rows, or one per row
//   grid     (split, tiles / columns), up to 512 threads; blocks of one row of the grid are a cluster
//   Weights are the 16-row operand of m16n8k16, tokens its 8 columns. A block has `columns` tiles of 64 columns and
//   1 / split of K. Its warps divide the tiles and take chunks of 128 rows in turns; a warp works alone until the end. It
//   loads weights straight into registers (stream.cuh), before the previous kernel has ended, since only x may depend on
//   that kernel; then it loads x of its own rows (inputs.cuh).
//   Operands are bare codes; y of a group is scale * (x times codes - zero * sum of x), in fp32. At the end warps add
//   through shared memory, then blocks of a cluster send each other their sums (sums.cuh). The order of additions does
//   not depend on timing.
//   Numbers are exact operands: the sum of 128 rows is multiplied by the scale of its tile in fp32, or the total by the
//   scale of its column. Numbers with scales by group are scaled operands (device/scaled_codes.cuh). With a group index
//   per row, and from 9 tokens on with equal zero points, operands are scaled and rounded (looked_up.cuh, scaled.cuh).
//   Memory is the limit up to 8 tokens; at 16 tokens the number of instructions is nearly as limiting.
//
// Equals x @ weight.dequantize().T (qload/kernel_formats/marlin.py) up to the rounding of fp32 sums.
#pragma once

#include <type_traits>

#include "inputs.cuh"
#include "looked_up.cuh"
#include "scaled.cuh"
#include "stream.cuh"
#include "sums.cuh"

namespace qload::cuda {

/// Steps of x in registers or in flight. There are fewer for 8 bits, whose chunks take twice as long and more registers
/// for words; for 16 tokens with groups that end within a chunk; and for 24 tokens. Scaled operands use one step, which
/// leaves registers for more warps.
template <int bits, int token_tiles, Order order, Groups groups>
constexpr int held_steps =
    groups == Groups::kSymmetric ? 1
    : order == Order::kOwn && (bits == 8 || token_tiles == 3 ||
                               ((are_small(groups) || groups == Groups::kScaled) && token_tiles == 2))
        ? kSteps / 2
        : kSteps;

/// sum += x times a warp's part of the weight, in units of `Codes<T, code>`. The first loads of all three are in flight.
template <class T, Code code, int token_tiles, Order order, Groups groups, int kept, int held, bool cut, class OwnScales>
__device__ __forceinline__ void multiply_part(
    const Decode& call, const Chunks& work, const Part& part_of_warp, Words<bits_of(code), order, kept>& stream,
    OwnScales& scales, Inputs<T, token_tiles, order, held, cut>& inputs, float (&sum)[4][token_tiles][4]) {
  using C = Codes<T, code>;
  constexpr int bits = bits_of(code);
  constexpr bool looked_up = groups == Groups::kLookedUp, numbers = groups == Groups::kTiles;
  constexpr bool grouped = groups == Groups::kScaled, scaled = looked_up || grouped;  // kinds of scaled operands
  // Columns b = 1 of strips are 16 times too large.
  constexpr bool sixteenth = bits == 4 && C::kTiny && order == Order::kOwn;
  constexpr bool own = order == Order::kOwn, in_place = Words<bits, order, kept>::kInPlace;
  constexpr int steps = bits == 4 && own ? 2 : 1;  // steps of 32 rows in a piece
  constexpr int pieces = steps * (bits / 2);
  const auto [tile, start, last, row_warps, busy] = part_of_warp;

  const bool has_zeros = call.zeros;
  const uint32_t magic = in_register(Number<T>::kMagic);
  for (int chunk = start; busy && chunk < last; chunk += row_warps) {
    const bool more = chunk + row_warps < last;
    inputs.turn();
    float part[4][token_tiles][4];
    [[maybe_unused]] float x_sums[token_tiles][4];
    if constexpr (numbers || grouped) scales.enter(more);
    [[maybe_unused]] uint32_t words[pieces][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t in[token_tiles][4];
      if (more && step == kSteps - held) inputs.advance((chunk + row_warps) * kChunk, row_warps * kChunk);
      inputs.operands(step, in);
      if (!in_place && step % steps == 0)
#pragma unroll
        for (int i = 0; i < pieces; ++i) stream.take(step / steps * pieces + i, more, words[i]);
      const bool fresh = step == 0;
      const bool ends = are_small(groups) ? work.ends >> step & 1 : step == kSteps - 1;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t operand[2][4];
        if constexpr (in_place) {
          const int piece = step / steps * pieces + j;
          if constexpr (grouped)
            scales.pair(stream.piece(piece), step, j, operand);
          else
            C::pair(stream.piece(piece), step % 2, magic, operand);
          if (step % steps == steps - 1) stream.leave(piece, more);
        } else if constexpr (looked_up) {
          scaled_pair<T, bits>(call, words, chunk * kChunk + step * 32, tile, j, operand);
        } else if constexpr (grouped) {
          scales.pair(words[j], step, j, operand);
        } else if constexpr (own) {
          C::pair(words[j], step % 2, magic, operand);
        } else {
          C::pair(words, j, magic, operand);
        }
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) {
          float(&to)[4] = scaled ? sum[j][m] : part[j][m];
          multiply(to, operand[0], in[m][0], in[m][1], fresh && !scaled, T{});
          multiply(to, operand[1], in[m][2], in[m][3], false, T{});
        }
      }
      if constexpr (!scaled && !numbers)
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) multiply(x_sums[m], in[m], C::kOnes, C::kOnes, fresh, T{});
      if (more || step < kSteps - held) inputs.load_step(step);
      if constexpr (numbers) {
        if (ends) scales.add(part, sum);
      } else if constexpr (!scaled) {
        if (ends) {
          float x_sum[token_tiles][2];
          sums_of_own(x_sums, x_sum);
          if constexpr (groups == Groups::kOffsets)
            scales.template add<sixteenth>(part, x_sum, sum);
          else if (has_zeros)
            scales.template add<true, sixteenth>(part, x_sum, sum);
          else
            scales.template add<false, sixteenth>(part, x_sum, sum);
          constexpr bool small = are_small(groups);
          scales.advance(step == kSteps - 1 ? work.chunk_step : work.group_step, small ? work.turn_groups : 0);
          if (step < kSteps - 1) clear(part), clear(x_sums);
        }
      }
    }
  }
}

/// The same with bare codes, for scales that do not fit in operands.
template <class T, int token_tiles>
__device__ __noinline__ void multiply_apart(const Decode& call, const Chunks& work, const Part& part,
                                            unsigned char* shared, float (&sums)[4][token_tiles][4]) {
  constexpr int kept = 4, held = 1;
  Words<4, Order::kOwn, kept> stream(call, part.tile, part.first, part.turn);
  Scales<T, 4> scales(call, part.tile, work.chunk_step ? part.first : 0);
  Inputs<T, token_tiles, Order::kOwn, held> inputs(call, work, shared);
  stream.load_first();
  scales.template load_first<false>(work);
  inputs.start_load(part.first * kChunk);
  float sum[4][token_tiles][4] = {};
  multiply_part<T, Code::kUint4, token_tiles, Order::kOwn, Groups::kChunks, kept>(call, work, part, stream, scales, inputs, sum);
#pragma unroll
  for (int i = 0; i < 16 * token_tiles; ++i) (&sums[0][0][0])[i] = (&sum[0][0][0])[i] * Codes<T, Code::kUint4>::kUnit;
}

/// `kept`: 16-byte loads of weights in flight for each lane.
template <class T, Code code, int token_tiles, Order order, Groups groups, int kept>
__global__ void __launch_bounds__(32 * most_warps(token_tiles, groups), 1)
decode_kernel(const __grid_constant__ Decode call, const __grid_constant__ Chunks work) {
  constexpr bool looked_up = groups == Groups::kLookedUp, scaled = groups == Groups::kSymmetric;
  constexpr bool numbers = groups == Groups::kTiles || groups == Groups::kScaled;
  constexpr int bits = bits_of(code);
  constexpr int own_bytes = warp_bytes(8 * token_tiles, order, groups), held = held_steps<bits, token_tiles, order, groups>;
  extern __shared__ __align__(128) unsigned char memory[];

  // A division keeps the value in a register, which is faster for this loop only.
  constexpr bool quotient = order == Order::kOwn && token_tiles == 2;
  const int row_warps = quotient ? blockDim.x / 32 / work.columns : work.row_warps;
  const int warp = threadIdx.x / 32, row_warp = warp / work.columns;
  const int tile = blockIdx.y * work.columns + warp % work.columns;
  const int first = work.chunks * blockIdx.x / work.split, last = work.chunks * (blockIdx.x + 1) / work.split;
  const int start = first + row_warp;
  const bool busy = row_warp < row_warps && tile < call.N / kTileN && start < last;

  let_dependents_start();
  Words<bits, order, kept> stream(call, tile, start, row_warps);
  ScalesOf<T, code, groups> scales(call, tile, numbers ? start : work.chunk_step ? start * __popc(work.ends) : 0);
  if (busy) {
    stream.load_first();
    if constexpr (numbers)
      scales.load_first(row_warps);
    else if (!looked_up)
      scales.template load_first<are_small(groups)>(work);
  }
  expect_sums(work, call.M, memory);
  wait_for_earlier_kernels();
  if (call.token_scales && threadIdx.x < call.M && threadIdx.x % 32 == 0) fetch_nearest(call.token_scales + threadIdx.x);

  constexpr bool staged = are_staged(8 * token_tiles, groups);
  using Own = std::conditional_t<staged, StagedInputs<T, token_tiles>, Inputs<T, token_tiles, order, held>>;
  Own inputs(call, work, memory + warp * own_bytes);
  if (busy) inputs.start_load(start * kChunk);
  float sum[4][token_tiles][4] = {};
  const Part part{tile, start, last, row_warps, busy};
  if constexpr (scaled) {
    if (!multiply_scaled<T, token_tiles, kept>(work, part, stream, scales, inputs, sum)) {
      float apart[4][token_tiles][4];  // in memory, so that `sum` stays in registers
      multiply_apart<T, token_tiles>(call, work, part, memory + warp * own_bytes, apart);
      memcpy(sum, apart, sizeof sum);
    }
  } else {
    multiply_part<T, code, token_tiles, order, groups, kept>(call, work, part, stream, scales, inputs, sum);
    if constexpr (numbers)
      if (busy) scales.leave(sum);  // idle warps have loaded no scales
  }
  __syncwarp();  // x is no longer needed: sums are stored in its place
  store<T>(call, work, sum, memory, own_bytes, looked_up || scaled ? 1.0f : Codes<T, code>::kUnit);
}

}  // namespace qload::cuda
