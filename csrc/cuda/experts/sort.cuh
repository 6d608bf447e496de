// Sorts pairs by expert and divides them into items.
//
//   out  order, places, items: see experts.h
//
//   grid   a block for each expert, which counts all pairs and places its own
//   For few pairs the time is that of three round trips to the L2. No position depends on timing.
//
// Equals a stable sort of the pairs by expert, with those of other ranks last.
#pragma once

#include "choice.cuh"

namespace qload::cuda {

constexpr int kSortThreads = 256;

/// Sum of a number over the block's threads. `room`: a free slot for each warp.
__device__ __forceinline__ int sum_of_block(int number, int* room) {
#pragma unroll
  for (int i = 16; i; i /= 2) number += __shfl_xor_sync(~0u, number, i);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = number;
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < kSortThreads / 32; ++i) sum += room[i];
  return sum;
}

__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ Sort call) {
  extern __shared__ int counts[];  // of pairs by expert
  __shared__ int room[4][kSortThreads / 32];
  const Choice& choice = call.choice;
  const int own = blockIdx.x, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < choice.experts; i += kSortThreads) counts[i] = 0;
  let_dependents_start();
  wait_for_earlier_kernels();
  __syncthreads();
  for (int i = threadIdx.x; i < choice.pairs; i += kSortThreads) {
    const int expert = expert_of(choice, i);
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();

  const auto items_of = [&](int count) { return (count + call.tokens - 1) / call.tokens; };
  int pairs = 0, items = 0, all_items = 0;  // the first two are of the experts before
  for (int i = threadIdx.x; i < choice.experts; i += kSortThreads) {
    all_items += items_of(counts[i]);
    if (i < own) pairs += counts[i], items += items_of(counts[i]);
  }
  pairs = sum_of_block(pairs, room[0]), items = sum_of_block(items, room[1]);
  all_items = sum_of_block(all_items, room[3]);
  const int count = counts[own], own_items = items_of(count);
  const int pitch = kItemHead + call.tokens, first = pairs;
  int32_t* to = static_cast<int32_t*>(call.items) + int64_t{items} * pitch;  // the expert's own
  const auto head = [&](int i, int count) {
    *reinterpret_cast<int4*>(to + i * pitch) = make_int4(own, pairs + i * call.tokens, count, all_items);
    for (int j = max(count, 0); j < call.tokens; ++j) to[i * pitch + kItemHead + j] = 0;
  };
  for (int i = threadIdx.x; i < own_items; i += kSortThreads) head(i, min(call.tokens, count - i * call.tokens));
  const bool last = own == choice.experts - 1;
  if (last) {
    for (int i = items + own_items + threadIdx.x; i <= call.most_items; i += kSortThreads) head(i - items, -1);
    if (call.order)
      for (int i = pairs + count + threadIdx.x; i < choice.pairs; i += kSortThreads) call.order[i] = -1;
  }
  if (count == 0 && !(last && call.places)) return;

  for (int from = 0; from < choice.pairs; from += kSortThreads) {
    const int pair = from + threadIdx.x, expert = pair < choice.pairs ? expert_of(choice, pair) : -2;
    const unsigned same = __ballot_sync(~0u, expert == own);
    __syncthreads();  // all threads have read the previous turn
    if (threadIdx.x % 32 == 0) room[2][warp] = __popc(same);
    __syncthreads();
    int place = pairs + __popc(same & ((1u << threadIdx.x % 32) - 1));
    for (int i = 0; i < kSortThreads / 32; ++i) {
      if (i < warp) place += room[2][i];
      pairs += room[2][i];
    }
    if (expert == own) {
      const int own_place = place - first;
      if (call.order) call.order[place] = pair;
      to[own_place / call.tokens * pitch + kItemHead + own_place % call.tokens] = pair;
      if (call.places) call.places[pair] = place;
    } else if (last && call.places && expert == -1) {
      call.places[pair] = -1;
    }
  }
}

}  // namespace qload::cuda
