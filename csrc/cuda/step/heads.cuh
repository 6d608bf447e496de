// Rotary positions for the queries and keys of each token, and the store of keys and values in a cache.
//
//   a, b = x[j], x[j + size / 2]      or, with `pairs`, x[2 j], x[2 j + 1];       x: a head, optionally normalized first
//   a', b' = rounded(a * cos[j] - b * sin[j]), rounded(b * cos[j] + a * sin[j])
//
//   in, out  see PlaceHeads in step.h; values are copied
//   needs    size % 16 == 0, at most 512; all aligned to 16 bytes; a slot outside of the cache stops the device
//   grid     (tokens, blocks of heads), kHeadThreads threads; size / 16 lanes, rounded up to a power of two, have a head,
//            each with two groups of eight numbers that rotate together
//   The limit is the latency of one read and one write.
//
// Equals `Rope.turn` and `PagedCache.write` in the rounding of fp32 products (qload/models/rope.py, cache.py), values bit
// for bit; a norm is rounded before the rotation, as in `Norm`.
#pragma once

#include "eight.cuh"
#include "step.h"

namespace qload::cuda {

constexpr int kHeadThreads = 128;

template <class T, bool pairs>
__device__ __forceinline__ void turn(Eight<T>& first, Eight<T>& second, const float* cos, const float* sin) {
  const Eight<T> given[2] = {first, second};
  Eight<T>* made[2] = {&first, &second};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // With `pairs` each group of eight has four pairs.
    const int of_a = pairs ? j / 4 : 0, of_b = pairs ? j / 4 : 1;
    const int at_a = pairs ? j % 4 * 2 : j, at_b = pairs ? at_a + 1 : j;
    const float a = given[of_a][at_a], b = given[of_b][at_b];
    made[of_a]->set(at_a, fmaf(-b, sin[j], a * cos[j]));
    made[of_b]->set(at_b, fmaf(a, sin[j], b * cos[j]));
  }
}

template <class T, bool pairs>
__global__ void __launch_bounds__(kHeadThreads) place_heads_kernel(const __grid_constant__ PlaceHeads call, int lanes) {
  const int token = blockIdx.x, lane = threadIdx.x % lanes, eights = call.size / 8;
  const int head = blockIdx.y * (kHeadThreads / lanes) + threadIdx.x / lanes, turned = call.queries + call.kv;
  const int all = turned + call.kv;
  const bool there = head < all && lane < eights / 2;
  const int first = pairs ? 2 * lane : lane, second = pairs ? first + 1 : lane + eights / 2;
  let_dependents_start();
  wait_for_earlier_kernels();

  Eight<T> x[2] = {};
  if (there) {
    const int64_t from = (int64_t{token} * all + head) * eights;
    x[0] = eight<T>(call.heads, from + first), x[1] = eight<T>(call.heads, from + second);
  }
  const void* weight = head < call.queries ? call.q_norm : head < turned ? call.k_norm : nullptr;
  if (call.q_norm) {  // the same branch for all lanes of a warp, as their sums use shuffles
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(x[1][i], x[1][i], fmaf(x[0][i], x[0][i], squares));
    const float factor = rsqrtf(sum_of_lanes(squares, lanes) / static_cast<float>(call.size) + call.eps);
    if (there && weight) {
      const Eight<T> w[2] = {eight<T>(weight, first), eight<T>(weight, second)};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[0].set(i, x[0][i] * factor * w[0][i]), x[1].set(i, x[1][i] * factor * w[1][i]);
    }
  }
  if (!there) return;
  if (head < turned) {
    __align__(16) float cos[8], sin[8];
    const int64_t at = int64_t{token} * (call.size / 2) + 8 * lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reinterpret_cast<float4*>(cos)[i] = reinterpret_cast<const float4*>(call.cos + at)[i];
      reinterpret_cast<float4*>(sin)[i] = reinterpret_cast<const float4*>(call.sin + at)[i];
    }
    turn<T, pairs>(x[0], x[1], cos, sin);
  }
  void* to = call.q;
  int64_t row = int64_t{token} * call.queries + head;
  if (head >= call.queries) {
    const int64_t slot = call.slots[token];
    if (slot < 0 || slot >= call.places) __trap();
    to = head < turned ? call.keys : call.values;
    row = slot * call.kv + (head - (head < turned ? call.queries : turned));
  }
  put(to, row * eights + first, x[0]);
  put(to, row * eights + second, x[1]);
}

}  // namespace qload::cuda
