// Codes of x times codes of a weight in strips, both of 8 bits, on Hopper.
//
//   y[m, n] = token[m] * column[n] * sum over k of x[m, k] * code[k, n]  + bias[n]
//             or with tiles of 128 rows and 64 columns: token[m] * sum over tiles of scale[tile] * tile's sum  + bias[n]
//
//   in   see many.h; x (M, inputs) as permuted by quantize.cuh: row 8 t + 4 h + q of 32 is at 16 h + 4 t + q
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32; or parts of it in fp32 for add_slices
//
//   Rings, tiles and final sums are those of many.cuh. Four byte permutations convert a lane's 16 bytes of 32 rows to an
//   operand, since x is permuted alike. A box of x has the 128 rows of a stage.
//   The matrix unit keeps 13 bits below the largest addend in sums of e4m3. Sums of a stage begin at 0 and are added in
//   fp32 (promotion). Registers have room for a stage's sums of 128 tokens besides the total, so more tokens take turns.
//   Sums of int8 are exact in int32.
//
// Equals qload/kernels/scaled.py on the same codes, up to the loss beyond 13 bits in 128 rows.
#pragma once

#include <type_traits>

#include "many.cuh"

namespace qload::cuda {

/// Kernel for a call with coded inputs, or null if no block has so many tokens and columns.
template <class T, Code code>
ManyKernel w8a8_of(const Many& call);

namespace many_room {

constexpr int kSteps = kStage / 32;  // products of a stage
constexpr int kPartTokens = 128;     // tokens whose sums of a stage fit in registers besides all totals

/// Operand of 32 rows and 16 columns: two words have bytes of column c at even places, of c + 8 at odd ones.
template <Code code>
__device__ __forceinline__ void operand_of(const uint32_t (&words)[4], uint32_t (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bytes = __byte_perm(words[i / 2 * 2], words[i / 2 * 2 + 1], i % 2 ? 0x7531 : 0x6420);
    to[i] = code == Code::kInt8 ? bytes ^ 0x80808080u : bytes;
  }
}

/// Products have written these registers; no read moves before this point.
template <class Sum, int values>
__device__ __forceinline__ void settle(Sum (&sums)[values]) {
#pragma unroll
  for (int i = 0; i < values; ++i) {
    if constexpr (std::is_same_v<Sum, float>)
      asm volatile("" : "+f"(sums[i])::"memory");
    else
      asm volatile("" : "+r"(sums[i])::"memory");
  }
}

template <class T, Code code, int tokens, int columns>
__global__ void __maxnreg__((Registers<tokens, multiplying(columns, 1)>::kFirst))
w8a8_kernel(const __grid_constant__ Work work, const __grid_constant__ Many call, const __grid_constant__ Matrices from) {
#if QLOAD_WGMMA
  constexpr bool whole = code == Code::kInt8;
  constexpr int multiply = multiplying(columns, 1), eights = tokens / 8;
  constexpr int parts = whole ? 1 : (tokens + kPartTokens - 1) / kPartTokens, values = tokens / parts / 2;
  static_assert(strips_of(columns, 1) == 1, "a warp has one strip");
  using Own = Registers<tokens, multiply>;
  using Sum = std::conditional_t<whole, int, float>;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Barriers barriers;

  let_dependents_start();
  Rows<false, tokens> own_rows(call, work);
  int item = first_item();
  if (item >= own_rows.items) return;
  start_rings(call, work, barriers, multiply);
  if (threadIdx.x == multiply) prefetch_description(from.weights);
  if (threadIdx.x == multiply + 32) prefetch_description(from.inputs);
  if (call.neighbours)
    cluster_arrive(), cluster_wait();
  else
    __syncthreads();

  if (threadIdx.x >= multiply) {
    release_registers<Own::kGive>();
    Filling<code, Zeros::kSame, false, tokens, columns, 1, false, kStage> filling{from, call, work, own_rows, memory, barriers};
    return fill<multiply>(filling);
  }

  acquire_registers<Own::kTake>();
  const int tile = threadIdx.x / 128, number = opaque(threadIdx.x % 32), strip = opaque(threadIdx.x / 32 % 4);
  const bool grouped = work.group < call.K;
  // A lane's 16 bytes in lines of 128; eight such units are swizzled by the number of the line.
  const int line = strip * 4 + number / 8;
  const uint32_t words = opaque(shared_address(memory) + work.weights_at + tile * tile_bytes(8) + line * 128 +
                                  (number % 8 ^ line % 8) * 16);
  constexpr int box_rows = tokens * 128 / 16, part_rows = box_rows / parts;  // in units of the descriptor
  const uint64_t all_rows = matrix_descriptor(memory);
  const bool leaves_twice = number == 1 && call.neighbours;
  uint32_t operand[kSteps][4];
  Sum stage_sums[values];
  Sums<1, eights> sum;
  Slot box{}, stage{};

  const auto load_operand = [&](int step) {
    uint32_t word[4];
    load_shared(words + stage.at * (columns / kTile * tile_bytes(8)) + step * kPieceBytes, word);
    operand_of<code>(word, operand[step]);
  };
  const auto leave_words = [&] {  // the words are in registers
    __syncwarp();
    if (number == 0) arrive(barriers.free + stage.at);
    stage.advance(work.stages);
  };

#pragma unroll 1
  do {
    const Place place(call, work, own_rows, columns, item);
    own_rows.enter(place.row);
    const uint32_t left_at = remote_address(barriers.x_free, place.shares_x ? 1 - blockIdx.x : blockIdx.x);
    if constexpr (whole) {
#pragma unroll
      for (int i = 0; i < values; ++i) stage_sums[i] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < eights * 4; ++i) sum.of[0][i] = 0;
    }
    TileScales<1> scales;
    scales.begin(call, grouped, 0, place.first, place.column + tile * kTile, strip * 16 + number / 4, sum.unit);
    float scale = 1;
    const auto promote = [&](int part) {
      if constexpr (!whole) {
        settle(stage_sums);
#pragma unroll
        for (int i = 0; i < values; ++i)
          sum.of[0][part * values + i] = fmaf(stage_sums[i], scale, sum.of[0][part * values + i]);
      }
    };
    wait_for(barriers.arrived + stage.at, stage.parity);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_operand(step);
    leave_words();

#pragma unroll 1
    for (int left = place.last - place.first; left > 0; --left) {
      const uint64_t rows = all_rows + box.at * box_rows;
      wait_for(barriers.x_arrived + box.at, box.parity);
      if (grouped) {
        scale = scales.next[0];
        if (left > 1) scales.advance(1);
      }
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        fence_products();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint64_t at = rows + part * part_rows + 2 * step;
          if constexpr (whole)
            multiply_int8_async(stage_sums, operand[step], at);
          else if (step == 0)
            multiply_e4m3_async<true>(stage_sums, operand[step], at);
          else
            multiply_e4m3_async<false>(stage_sums, operand[step], at);
          group_products();
        }
        if (part + 1 < parts) wait_for_products<0>(), promote(part);
      }
      if (left > 1) wait_for(barriers.arrived + stage.at, stage.parity);
      const auto follow = [&](auto step) {  // the next stage's operand, after the product that reads the same registers
        constexpr int number = decltype(step)::value;
        wait_for_products<kSteps - 1 - number>();
        if (left > 1) load_operand(number);
      };
      follow(std::integral_constant<int, 0>{}), follow(std::integral_constant<int, 1>{});
      follow(std::integral_constant<int, 2>{}), follow(std::integral_constant<int, 3>{});
      if (number == 0) arrive(barriers.x_free + box.at);
      if (leaves_twice) arrive_remote(left_at + box.at * 8);
      box.advance(work.boxes);
      promote(parts - 1);
      if (left > 1) leave_words();
    }
    settle(stage_sums);
    if constexpr (whole)
#pragma unroll
      for (int i = 0; i < values; ++i) sum.of[0][i] = static_cast<float>(stage_sums[i]);
    if (grouped) sum.unit[0][0] = sum.unit[0][1] = 1;
    item += items_together();
    const Share share{tile * kTile, strip * 16 + number / 4, number % 4 * 2, 0};
    finish<1, multiply>(call, place, own_rows, 0, share, memory, reinterpret_cast<T*>(memory + work.transpose_at),
                        &barriers.sums_arrived, sum);
  } while (item < own_rows.items);
  if (call.neighbours) cluster_arrive(), cluster_wait();  // until then the neighbour may arrive at barriers here
#endif
}

}  // namespace many_room
}  // namespace qload::cuda
