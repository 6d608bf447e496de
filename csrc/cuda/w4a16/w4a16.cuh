// x times a 4-bit weight in Marlin's order, up to 64 tokens.
//
//   y[m, n] = sum over k of x[m, perm[k]] * scale[g, n] * (code[k, n] - zero[g, n])  + bias[n],   g = k / group
//
//   in   see w4a16.h; scales and zero points in Marlin's orders, so that a lane loads its own eight at once
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32
//
//   needs    K, N in multiples of 64, N / 64 of `columns`; groups of 32, 64, 128, or one
//   grid     (split, up to N / 64 / columns), 256 threads; blocks of one row of the grid are a cluster
//   Weights are the 16-row operand of m16n8k16, tokens its 8 columns. A block has `columns` tiles of 64
//   columns at a time and 1 / split of K; its warps share out the tiles, and chunks of 128 rows in turns. A lane's
//   16-byte load is its part of 16 rows x 64 columns; eight of them, or four, are always in flight.
//   x lies in shared memory, all of the block's K or as much as fits, a phase after the other. Up to 16 tokens
//   the operand is the bare code, y of a group scale * (sum x code - zero * sum x) in fp32; above, the operand
//   is scaled. At the end warps add through shared memory, then blocks of a cluster send each other their
//   sums. No order of additions depends on timing.
//   Weights are asked for before the kernel ahead has ended: only x may depend on it.
//   Memory is the limit up to 16 tokens, the matrix unit above.
//
// Equals x @ GPTQMarlinWeight.dequantize().T (qload/kernel_formats/marlin.py) up to the rounding of fp32 sums.
#pragma once

#include "../device/barrier.cuh"
#include "../device/cluster.cuh"
#include "inputs.cuh"
#include "w4a16.h"
#include "weights.cuh"

namespace qload::cuda {

/// `small`: groups of 32 or 64, several to a chunk.
template <class T, int token_tiles, bool has_zeros, bool small>
__global__ void __launch_bounds__(kBlock, token_tiles <= 2 ? 2 : 1)
w4a16_kernel(const __grid_constant__ W4A16 call, const __grid_constant__ Work work) {
  constexpr bool late = token_tiles == 1 || (token_tiles == 2 && !small);  // scales are applied to sums
  constexpr int kept = late && token_tiles == 2 ? 4 : kSteps;  // loads in flight, as registers allow
  using N = Number<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ uint64_t arrived[2];
  T* x = reinterpret_cast<T*>(memory);
  float* sums = reinterpret_cast<float*>(memory + work.sums_at);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane / 4;
  const int columns = 1 << work.columns_log, row_warps = kWarps >> work.columns_log;
  const int tile_groups = call.N / kTileN >> work.columns_log, row_warp = warp >> work.columns_log;
  const int first = work.chunks * blockIdx.x / work.split, last = work.chunks * (blockIdx.x + 1) / work.split;
  const int start = first + row_warp;

  let_dependents_start();

  // Weights: the lane's 16 bytes of each 16 rows. The next chunk, if need be of the next tile, is asked for while
  // one is used.
  const int tile_step = call.N / 2;
  const int last_steps = (call.K % kChunk ? call.K % kChunk : kChunk) / 16;
  const auto weights_at = [&](int tile_group, int chunk) {
    const int tile = (tile_group << work.columns_log) + (warp & (columns - 1));
    return static_cast<const uint4*>(call.weights) + static_cast<int64_t>(chunk) * kSteps * tile_step + tile * 32 + lane;
  };
  const auto steps_of = [&](int chunk) { return chunk == work.chunks - 1 ? last_steps : kSteps; };
  uint4 words[kept] = {};
  const uint4* weights = weights_at(blockIdx.y, start);
  int steps = start < last ? steps_of(start) : 0;
  const auto ask = [&](int step) {
    if (step < steps) words[step % kept] = load_once(weights + step * tile_step);
  };
#pragma unroll
  for (int step = 0; step < kept; ++step) ask(step);

  // Scales and zero points of eight columns, 8 apart: one load of a lane for each group, a group ahead.
  const bool per_column = call.group >= call.K;
  const int group_words = call.N / 8, first_group = per_column ? 0 : start * __popc(work.ends);
  const int groups = per_column ? 1 : call.K / call.group;
  int group = first_group, group_tile = blockIdx.y;
  uint4 next_scales{};
  uint32_t next_zeros = 0;
  const auto ask_group = [&] {
    if (group >= groups || group_tile >= tile_groups) return;
    const int tile = (group_tile << work.columns_log) + (warp & (columns - 1)), at = tile * 8 + column + group * group_words;
    if (!small && per_column) {
      next_scales = scales_per_column(static_cast<const T*>(call.scales) + tile * kTileN, column);
    } else {
      next_scales = __ldg(static_cast<const uint4*>(call.scales) + at);
    }
    if constexpr (has_zeros) next_zeros = __ldg(static_cast<const uint32_t*>(call.zeros) + at);
  };
  ask_group();
  uint4 scale_words{};
  uint32_t zero_word = 0x88888888;
  const auto enter_group = [&](bool chunk_ends, bool tile_ends) {
    scale_words = next_scales;
    if constexpr (has_zeros) zero_word = next_zeros;
    if (chunk_ends && tile_ends) {
      group = first_group;
      group_tile += gridDim.y;
    } else {
      group += chunk_ends ? work.chunk_step : work.group_step;
    }
    ask_group();
  };

  float sum[4][token_tiles][4] = {};
  float part[late ? 4 : 1][token_tiles][4] = {}, inputs_sum[token_tiles][4] = {};
  const uint32_t magic = in_register(late ? N::kMagic : N::kExact);
  const auto leave_group = [&] {
    T own[8];
    memcpy(own, &scale_words, sizeof own);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float factor = wide(own[2 * j + b]) * N::kUnit;
        const float zero = N::kOffset + (has_zeros ? float_of(zero_word >> (4 * (4 * b + j)) & 15) : 8.0f);
#pragma unroll
        for (int m = 0; m < token_tiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& codes = part[late ? j : 0][m][2 * b + i];
            sum[j][m][2 * b + i] += factor * (codes - zero * inputs_sum[m][i]);
            codes = 0;
          }
      }
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) inputs_sum[m][i] = 0;
  };

  // Each block of a cluster gets the sums of its share of the columns and tokens from all blocks, and uses them a
  // tile later. Two rooms in turns: a block sends for a tile after it used those of the tile before, so who has
  // got its sums of one tile may send for the next.
  const int width = kTileN << work.columns_log, width_log = work.columns_log + 6;
  const int count = width * call.M, share = count / work.split;
  if (work.split > 1) {
    if (threadIdx.x < 2) {
      start_barrier(arrived + threadIdx.x, 1);
      publish_barriers();
    }
    cluster_arrive();
  }

  const auto put = [&](int tile_group, int i, float value) {
    const int n = (tile_group << width_log) + (i & (width - 1)), m = i >> width_log;
    if (n >= call.outputs) return;
    if (call.bias) value += wide(static_cast<const T*>(call.bias)[n]);
    static_cast<T*>(call.y)[static_cast<int64_t>(m) * call.outputs + n] = narrow<T>(value);
  };
  // A share of each block; never where x lies, which this block may still need when others send.
  const auto room_of = [&](int turn) { return reinterpret_cast<float*>(memory + work.received_at) + turn % 2 * count; };
  const auto take = [&](int turn, int tile_group) {
    wait_for_cluster(arrived + turn % 2, turn / 2 % 2);
    for (int i = threadIdx.x; i < share; i += kBlock) {
      float value = 0;
      for (int rank = 0; rank < work.split; ++rank) value += room_of(turn)[rank * share + i];
      put(tile_group, blockIdx.x * share + i, value);
    }
  };

  wait_for_earlier_kernels();
  const int pitch = work.phase_chunks * kChunk + 8;
  const bool resident = work.sums_at && work.phase_chunks >= last - first;  // x is read once for all tiles
  const uint32_t ones[4] = {N::kOnes, N::kOnes, N::kOnes, N::kOnes};
  const auto stage_phase = [&](int phase, int place) {
    stage<T>(call, phase * kChunk, (min(phase + work.phase_chunks, last) - phase) * kChunk, pitch, x + place);
  };
  int turn = 0, last_group = 0;
  for (int tile_group = blockIdx.y; tile_group < tile_groups; tile_group += gridDim.y, ++turn) {
    int place = 0;
    for (int phase = first; phase < last; phase += work.phase_chunks) {
      const int end = min(phase + work.phase_chunks, last);
      if (turn == 0 || !resident) {
        if (phase == first || !work.next_at) {  // else it is on its way
          if (turn > 0 || phase > first) __syncthreads();
          stage_phase(phase, place);
        }
        wait_for_copies();
        __syncthreads();
        if (work.next_at && end < last) stage_phase(end, work.next_at - place);
      }
      const T* rows[token_tiles];  // of tokens that are not there any will do: nobody reads their sums
#pragma unroll
      for (int m = 0; m < token_tiles; ++m)
        rows[m] = x + place + min(8 * m + lane % 8, call.M - 1) * pitch + row_warp * kChunk + lane / 8 * 8;
      for (int chunk = phase + row_warp; chunk < end; chunk += row_warps) {
        const bool tile_ends = chunk + row_warps >= last;
        const int next = tile_ends ? start : chunk + row_warps;
        uint32_t inputs[token_tiles][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step % 2 == 0) {
            if (step == 0 || (small && work.ends >> (step - 1) & 1))
              enter_group(!small || !(work.ends & ((1u << (kSteps - 1)) - (1u << step))), tile_ends);
#pragma unroll
            for (int m = 0; m < token_tiles; ++m) load_matrices(inputs[m], rows[m] + step * 16);
          }
          const uint4 taken = words[step % kept];
          const uint32_t word[4] = {taken.x, taken.y, taken.z, taken.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t operand[4];
            operand_of(word[j], magic, operand);
            if constexpr (!late) {
              T own[8];
              memcpy(own, &scale_words, sizeof own);
              const uint32_t zeros[2] = {exact_zero<T>(zero_word >> (4 * j) & 15),
                                         exact_zero<T>(zero_word >> (16 + 4 * j) & 15)};
              const uint32_t scales[2] = {twice(own[2 * j]), twice(own[2 * j + 1])};
              scale<T>(operand, zeros, scales);
            }
#pragma unroll
            for (int m = 0; m < token_tiles; ++m)
              multiply(late ? part[late ? j : 0][m] : sum[j][m], operand, inputs[m][step % 2 * 2],
                       inputs[m][step % 2 * 2 + 1], T{});
          }
          if (step + kept == kSteps) {  // from here on it is the next chunk's
            weights = weights_at(tile_ends ? tile_group + gridDim.y : tile_group, next);
            steps = tile_ends && tile_group + gridDim.y >= tile_groups ? 0 : steps_of(next);
          }
          ask((step + kept) % kSteps);
          if constexpr (late) {
#pragma unroll
            for (int m = 0; m < token_tiles; ++m)
              multiply(inputs_sum[m], ones, inputs[m][step % 2 * 2], inputs[m][step % 2 * 2 + 1], T{});
            if (small ? step % 2 == 1 && (work.ends >> step & 1) : step == kSteps - 1) leave_group();
          }
        }
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) rows[m] += row_warps * kChunk;
      }
      place = work.next_at - place;
    }

    // Warps of the block that have the same columns, then blocks of the cluster.
    constexpr int row = 8 * token_tiles + 1;
    if (turn > 0 || work.sums_at == 0) __syncthreads();  // the sums before, or x, lie there
    float* own = sums + (warp * kTileN + column) * row + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int m = 0; m < token_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * m + lane % 4 * 2 + i % 2 < call.M) own[(16 * j + 8 * (i / 2)) * row + 8 * m + i % 2] = sum[j][m][i];
          sum[j][m][i] = 0;
        }
    __syncthreads();
    // What other blocks sent of the tile before is here by now; only then this block sends more.
    if (work.split > 1) {
      if (turn == 0) cluster_wait();
      if (threadIdx.x == 0) expect_bytes(arrived + turn % 2, 4 * count);
      if (turn > 0) take(turn - 1, tile_group - gridDim.y);
    }
    for (int i = threadIdx.x; i < count; i += kBlock) {
      const float* at = sums + (i & (width - 1)) * row + (i >> width_log);
      float value = 0;
      for (int w = 0; w < row_warps; ++w) value += at[w * width * row];
      if (work.split == 1) {
        put(tile_group, i, value);
      } else {
        const int to = i / share;
        send(value, room_of(turn) + blockIdx.x * share + (i - to * share), arrived + turn % 2, to);
      }
    }
    last_group = tile_group;
  }
  if (work.split > 1) take(turn - 1, last_group);
}

}  // namespace qload::cuda
