// x times a weight of 2, 3, 4 or 8 bits in ExLlama's order, 16 tokens a block.
//
//   y[m, n] = sum over k of x[m, perm[k]] * scale[g, n] * (code[k, n] - zero[g, n])  + bias[n],   g = g_idx[k]
//
//   in   see exllama.h
//   out  y      fp16 or bf16 (M, N), rounded once from fp32
//
//   needs    N a multiple of 4; K and N of whole words; groups of any rows
//   grid     (split, tiles / columns, tokens / 16), 512 threads, 384 for more than 8 tokens; blocks that differ in
//            their x alone are a cluster
//   Weights are the 16-row operand of m16n8k16, tokens its 8 columns. A block has `columns` tiles of 64 columns; the
//   warps of its cluster that have the same tile share out K, each a run of steps of 32 rows (2 bits: 64, 3: 128).
//   Words, x and g_idx of several steps are in flight in registers, and a lane's words are its operands: see codes.cuh.
//   A warp waits for no other before its sums are done. Operands are bare codes; y of a group is
//   scale * (x times codes - zero * sum of x), in fp32. A step with rows of several groups is multiplied once for
//   each, with x zero elsewhere. At the end warps add through shared memory, then blocks of a cluster send each
//   other their sums. No order of additions depends on timing.
//   Weights are asked for before the kernel ahead has ended: only x may depend on it.
//   Memory is the limit up to 8 tokens.
//
// Equals x @ ExllamaWeight.dequantize().T (qload/kernels/exllama.py) up to the rounding of fp32 sums.
#pragma once

#include "../device/ptx.cuh"
#include "codes.cuh"
#include "division.h"
#include "exllama.h"
#include "groups.cuh"
#include "inputs.cuh"
#include "sums.cuh"

namespace qload::cuda::exl {

constexpr int kNone = 0x7FFFFFFF;  // no group

template <class T, int bits, int token_tiles>
__global__ void __launch_bounds__(32 * warps_of(token_tiles), 1)
exllama_kernel(const __grid_constant__ Exllama call, const __grid_constant__ Division work) {
  using R = Rows<bits>;
  using C = Codes<T, bits>;
  constexpr int kDepth = R::kDepth, kIndices = R::kStep / 32;
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4, part_of_step = lane % 4;
  const int row_warps = blockDim.x / 32 / work.columns, sharers = row_warps * work.split;
  const int tile_column = (blockIdx.y * work.columns + warp % work.columns) * kTileN;
  const int sharer = blockIdx.x * row_warps + warp / work.columns;
  const int first = work.steps * sharer / sharers;
  const int count = tile_column < call.N ? work.steps * (sharer + 1) / sharers - first : 0;

  let_dependents_start();

  // Weights and groups of rows. Those that are not there are zeros and the group of the step's first row.
  uint32_t words[kDepth][R::kWords][2][4] = {};
  int groups[kDepth][kIndices];
  const int word_rows = call.K / 4 * bits / 8;
  const bool there[2] = {tile_column + 4 * column < call.N, tile_column + 32 + 4 * column < call.N};
  const uint32_t* columns = static_cast<const uint32_t*>(call.weights) + tile_column + 4 * column;
  const auto ask = [&](int step, int slot) {
    if (step >= count) return;
    const int row = ((first + step) * 4 + part_of_step) * R::kWords;
#pragma unroll
    for (int w = 0; w < R::kWords; ++w)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 four{};
        if (there[half] && row + w < word_rows)
          four = load_once(reinterpret_cast<const uint4*>(columns + int64_t{row + w} * call.N + 32 * half));
        auto& to = words[slot][w][half];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      }
    const int at = (first + step) * R::kStep;
#pragma unroll
    for (int i = 0; i < kIndices; ++i) {
      const int k = at + 32 * i + lane;
      groups[slot][i] = __ldg(call.g_idx + (k < call.K ? k : at));
    }
  };
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) ask(slot, slot);

  // Scales and zero points: those of the group that sums are of, and of the group that follows.
  Group<T, bits> now{}, ahead{};
  int group_now = kNone, group_ahead = kNone, last_group = -1;
  const auto look_ahead = [&](int group) {
    group_ahead = group;
    ahead.read(call, group, tile_column, column);
  };
  if (count > 0) {
    look_ahead(min(first * R::kStep / call.group, call.groups - 1));
    last_group = __ldg(call.g_idx + min((first + count) * R::kStep, call.K) - 1);
  }

  float sum[4][token_tiles][4] = {}, part[4][token_tiles][4] = {}, x_sum[token_tiles][4] = {};
  const auto leave_group = [&] {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int at = 2 * (j % 2) + b;
        const float scale = now.scale(j / 2, at), zero = C::kOffset + now.zero(call, j / 2, column, at);
#pragma unroll
        for (int m = 0; m < token_tiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& codes = part[j][m][2 * b + i];
            sum[j][m][2 * b + i] += scale * fmaf(-zero, x_sum[m][i], codes);
            codes = 0;
          }
      }
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) x_sum[m][i] = 0;
  };
  const auto enter_group = [&](int group) {
    if (group == group_now) return;
    if (group_now != kNone) leave_group();
    if (group == group_ahead)
      now = ahead;
    else
      now.read(call, group, tile_column, column);
    group_now = group;
    if (group < last_group) look_ahead(group + 1);
  };

  const uint32_t magic = in_register(Number<T>::kMagic);
  const uint32_t ones[4] = {Number<T>::kOnes, Number<T>::kOnes, Number<T>::kOnes, Number<T>::kOnes};
  const auto multiply_step = [&](const uint32_t (&own)[R::kWords][2][4], const uint32_t (&in)[token_tiles][R::kPairs]) {
#pragma unroll
    for (int q = 0; q < R::kPairs; q += 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t operand[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[i] = C::pair(own, j / 2, 2 * (j % 2) + i % 2, q + i / 2, magic);
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) multiply(part[j][m], operand, in[m][q], in[m][q + 1], T{});
      }
#pragma unroll
      for (int m = 0; m < token_tiles; ++m) multiply(x_sum[m], ones, in[m][q], in[m][q + 1], T{});
    }
  };
  /// The inputs whose rows are of one group; the others are zero.
  const auto only = [&](int group, int k, uint32_t (&in)[token_tiles][R::kPairs]) {
#pragma unroll
    for (int q = 0; q < R::kPairs; ++q) {
      uint32_t kept = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (k + 2 * q + r < call.K && __ldg(call.g_idx + k + 2 * q + r) == group) kept |= 0xFFFFu << (16 * r);
#pragma unroll
      for (int m = 0; m < token_tiles; ++m) in[m][q] &= kept;
    }
  };

  if (work.split > 1) cluster_arrive();
  wait_for_earlier_kernels();
  const int first_token = blockIdx.z * kTokens, tokens = min(kTokens, call.M - first_token);
  const Inputs<T, bits, token_tiles> inputs(call, first_token, tokens, lane);
  uint32_t x[kDepth][token_tiles][R::kPairs] = {};
  const auto row_of = [&](int step) { return (first + step) * R::kStep + part_of_step * R::kOwn; };
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot)
    if (slot < count) inputs.read(call, work.runs, row_of(slot), x[slot]);

  for (int base = 0; base < count; base += kDepth)
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
      const int step = base + slot;
      if (step >= count) break;
      int group = __shfl_sync(0xFFFFFFFF, groups[slot][0], 0);
      bool same = true;
#pragma unroll
      for (int i = 0; i < kIndices; ++i) same = same && groups[slot][i] == group;
      const bool mixed = !__all_sync(0xFFFFFFFF, same);
      const auto next_after = [&](int before) {
        int least = kNone;
#pragma unroll
        for (int i = 0; i < kIndices; ++i)
          if (groups[slot][i] > before) least = min(least, groups[slot][i]);
        return __reduce_min_sync(0xFFFFFFFF, least);
      };
      if (mixed) group = next_after(-1);
      do {
        enter_group(group);
        uint32_t in[token_tiles][R::kPairs];
        memcpy(in, x[slot], sizeof in);
        if (mixed) only(group, row_of(step), in);
        multiply_step(words[slot], in);
        group = mixed ? next_after(group) : kNone;
      } while (group != kNone);
      ask(step + kDepth, slot);
      if (step + kDepth < count) inputs.read(call, work.runs, row_of(step + kDepth), x[slot]);
    }
  if (group_now != kNone) leave_group();
  add_up<T>(call, work, first_token, tokens, sum, memory, C::kUnit);
}

}  // namespace qload::cuda::exl
