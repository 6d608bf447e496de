// x times a weight of 2, 3, 4 or 8 bits in ExLlama's order, 16 tokens per block.
//
//   y[m, n] = sum over k of x[m, perm[k]] * scale[g, n] * (code[k, n] - zero[g, n])  + bias[n],   g = g_idx[k]
//
//   in   see exllama.h
//   out  y      fp16 or bf16 (M, N), rounded once from fp32
//
//   needs    N a multiple of 4; K and N of whole words; groups with rows in any order
//   grid     (split, tiles / columns, tokens / 16), 512 threads, 384 for more than 8 tokens; blocks that differ only in
//            their x are a cluster
//   Weights are the 16-row operand of m16n8k16, tokens its 8 columns. A block has `columns` tiles of 64 columns. The
//   warps of a cluster with the same tile divide K: each has a run of chunks of 128 rows (8 bits: 64), multiplied in steps
//   of 32 rows (2 bits: 64, 3: 128). Words and g_idx are loaded into registers one chunk ahead, x one step ahead; a
//   lane's words are its operands (codes.cuh). A warp waits for no other warp before its sums are complete.
//   Operands are bare codes; y of a group is scale * (x times codes - zero * sum of x), in fp32. In a chunk with steps of
//   several groups each step is multiplied once for each of its groups, with zeros for x of the other groups.
//   At the end warps add through shared memory, then blocks of a cluster send each other their sums. The order of
//   additions does not depend on timing.
//   Weights are loaded before the previous kernel has ended: only x may depend on that kernel.
//   Memory is the limit up to 8 tokens.
//
// Equals x @ ExllamaWeight.dequantize().T (qload/kernel_formats/exllama.py) up to the rounding of fp32 sums.
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
__global__ void __launch_bounds__(32 * most_warps(token_tiles), 1)
exllama_kernel(const __grid_constant__ Exllama call, const __grid_constant__ Shares work) {
  using R = Rows<bits>;
  using C = Codes<T, bits>;
  constexpr int kSteps = R::kSteps, kInputs = bits == 4 && token_tiles == 1 ? 2 : 1;  // of a chunk; steps with x in registers
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // tells the compiler that the value is the same for all lanes of a warp
  const int lane = in_register(threadIdx.x % 32), column = lane / 4, part_of_step = lane % 4;
  const int row_warp = warp * work.column_factor >> 16;
  const int tile_column = (blockIdx.y * work.columns + warp - row_warp * work.columns) * kTileN;
  const int sharer = blockIdx.x * work.row_warps + row_warp;
  const int first = sharer * work.share + min(sharer, work.rest);
  const int last = tile_column < call.N ? first + work.share + (sharer < work.rest) : first;

  let_dependents_start();

  // Weights and groups of rows. Beyond the last row or column the last one is read: x is zero there, or the sums are
  // not stored.
  uint32_t words[kSteps][R::kWords][2][4];
  int groups[kSteps][R::kIndices];
  const int last_word = call.K / 4 * bits / 8 - 1, pitch = 4 * call.N;
  const unsigned char* columns[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    columns[half] = opaque(static_cast<const unsigned char*>(call.weights) +
                             int64_t{4} * min(tile_column + 32 * half + 4 * column, call.N - 4));
  const auto start_load = [&](int chunk, int step) {
    chunk = opaque(chunk);  // with a known value the compiler would load words of several steps at once, too late
    if (chunk >= last) return;
    const int row = (chunk * kSteps + step) * R::kStep;
#pragma unroll
    for (int w = 0; w < R::kWords; ++w)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = min(row / 32 * bits + part_of_step * R::kWords + w, last_word);
        const uint4 four = load_once(reinterpret_cast<const uint4*>(columns[half] + at * pitch));
        auto& to = words[step][w][half];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      }
  };
  const auto ask_groups = [&](int chunk, int step) {
    if (chunk >= last) return;
#pragma unroll
    for (int i = 0; i < R::kIndices; ++i) {
      const int row = ((chunk * kSteps + step) * R::kIndices + i) * 32;
      groups[step][i] = __ldg(call.g_idx + min(row + lane, call.K - 1));
    }
  };
#pragma unroll
  for (int step = 0; step < kSteps; ++step) start_load(first, step), ask_groups(first, step);

  // Scales and zero points are loaded at the start of a group and used at its end.
  Group<T, bits> held{};
  int group_now = ~min(first * R::kRows / call.group, call.groups - 1);  // before the first group: its complement
  if (first < last) held.read(call, ~group_now, tile_column, column);

  float sum[4][token_tiles][4] = {}, part[4][token_tiles][4] = {}, x_sum[token_tiles][4] = {};
  const auto leave_group = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t zeros = held.fields(call, half, column);
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const float scale = held.scale(half, at), zero = held.zero(call, zeros, at);
#pragma unroll
        for (int m = 0; m < token_tiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& codes = part[2 * half + at / 2][m][2 * (at % 2) + i];
            sum[2 * half + at / 2][m][2 * (at % 2) + i] += scale * fmaf(-zero, x_sum[m][i], codes);
            codes = 0;
          }
      }
    }
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) x_sum[m][i] = 0;
  };
  const auto enter_group = [&](int group) {
    if (group == group_now) return;
    if (group_now >= 0) leave_group();
    if (group != ~group_now) held.read(call, group, tile_column, column);
    group_now = group;
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
  /// Set inputs to zero if their rows are of another group.
  const auto only = [&](const int (&indices)[R::kIndices], int group, uint32_t (&in)[token_tiles][R::kPairs]) {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < R::kIndices; ++i) {
      const uint32_t rows = __ballot_sync(0xFFFFFFFF, indices[i] == group);
      if (i == part_of_step * R::kOwn / 32) own = rows >> part_of_step * R::kOwn % 32;
    }
#pragma unroll
    for (int q = 0; q < R::kPairs; ++q) {
      const uint32_t kept = (own >> 2 * q & 1) * 0xFFFF | (own >> 2 * q & 2) * 0x7FFF8000;
#pragma unroll
      for (int m = 0; m < token_tiles; ++m) in[m][q] &= kept;
    }
  };
  /// Multiply a step once for each group of its rows; `again` restores its inputs.
  const auto multiply_each = [&](const int (&indices)[R::kIndices], const uint32_t (&own)[R::kWords][2][4],
                                 uint32_t (&in)[token_tiles][R::kPairs], const auto& again) {
    const auto next_after = [&](int before) {
      int least = kNone;
#pragma unroll
      for (int index : indices)
        if (index > before) least = min(least, index);
      return __reduce_min_sync(0xFFFFFFFF, least);
    };
    int group = next_after(-1);
    do {
      enter_group(group);
      only(indices, group, in);
      multiply_step(own, in);
      group = next_after(group);
      if (group != kNone) again(in);
    } while (group != kNone);
  };

  const int first_token = blockIdx.z * kTokens, tokens = min(kTokens, call.M - first_token);
  expect_sums(work, tokens, memory);
  wait_for_earlier_kernels();
  float* own_sums = reinterpret_cast<float*>(memory) + warp * (8 * token_tiles * kSumPitch);
  uint32_t x[kInputs][token_tiles][R::kPairs];
  Inputs<T, bits, token_tiles> inputs(call, work.runs, first_token, tokens, first * R::kRows, own_sums);
  if (first < last) inputs.read(0, x[0]);

  for (int chunk = first; chunk < last; ++chunk) {
    const auto steps = [&](const auto& multiply) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool more = step + 1 < kSteps;
        if (more && kInputs == 2) inputs.read(step + 1, x[(step + 1) % kInputs]);
        multiply(step, x[step % kInputs]);
        start_load(chunk + 1, step);
        if (more && kInputs == 1) inputs.read(step + 1, x[0]);
        if (more || chunk + 1 >= last) continue;
        inputs.turn((chunk + 1) * R::kRows);
        inputs.read(0, x[0]);
      }
    };
    const int group = __shfl_sync(0xFFFFFFFF, groups[0][0], 0);
    bool same = true;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int index : groups[step]) same = same && index == group;
    if (__all_sync(0xFFFFFFFF, same)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) ask_groups(chunk + 1, step);
      enter_group(group);
      steps([&](int step, const auto& in) { multiply_step(words[step], in); });
    } else {
      steps([&](int step, auto& in) {
        multiply_each(groups[step], words[step], in, [&](auto& to) { inputs.read(step, to); });
        ask_groups(chunk + 1, step);
      });
    }
  }
  if (group_now >= 0) leave_group();
  __syncwarp();  // x is no longer needed: sums are stored in its place
  store<T>(call, work, first_token, tokens, sum, memory, C::kUnit);
}

}  // namespace qload::cuda::exl
