// The experts of each token and their weights, from the input of a router.
//
//   logit[m, e] = rounded(sum_k x[m, k] * weight[e, k] + bias[e])
//   score[m, e] = exp(logit[m, e] - largest) / sum_e exp(logit[m, e] - largest)     over all experts
//   ids[m]      = the `top` experts of the largest scores in their order; of equal scores the lower number first
//   weights[m]  = their scores, divided by the sum of these if `renormalized`
//   With `over_chosen` the largest logits are chosen, and the sum over e is one over the chosen experts.
//
//   in, out  see RouteTokens in step.h
//   needs    size % 8 == 0; x and weight at multiples of 16 bytes; at most kMostRouted experts, and 32 of a token
//   grid     (split, runs of kRoutedTokens tokens), kRouteWarps warps. `split` blocks are a cluster. A warp multiplies the
//            tokens of a run by one expert after another, whose weights stay in registers if there are at most 2048; a
//            token's logits go to the block that chooses its experts
//   The limit is the latency of one read of the weights, and of `top` consecutive maxima over lanes.
//
// Equals `Routing.route` of `Routing.logits` (qload/experts/routing.py) within the rounding of the sums of logits and of
// weights; scores of equal logits have torch's bits.
#pragma once

#include <climits>

#include "../device/cluster.cuh"
#include "eight.cuh"
#include "step.h"

namespace qload::cuda {

constexpr int kRouteWarps = 16, kRoutedTokens = 8, kMostRouted = 1024, kMostChosen = 32;
constexpr int kRouteEights = 8, kLoaded = 32 * kRouteEights;  // eights of a lane in flight together, and of a warp

/// A number in the order of floats; NaN is the largest, and 0 is less than every float.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value);
  return value != value ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

/// A softmax over the numbers of a lane, `experts` in all lanes together, in their place.
__device__ __forceinline__ void soften(float* scores, int experts, int lane) {
  float most = -INFINITY, total = 0;
  for (int e = lane; e < experts; e += 32) most = fmaxf(most, scores[e]);
  most = value_of(__reduce_max_sync(0xFFFFFFFFu, key_of(most)));
  for (int e = lane; e < experts; e += 32) total += scores[e] = expf(scores[e] - most);
  total = sum_of_lanes(total, 32);
  for (int e = lane; e < experts; e += 32) scores[e] /= total;
}

/// A warp chooses for one token; its logits are overwritten.
template <class T>
__device__ __forceinline__ void choose_experts(const RouteTokens& call, float* logits, int64_t token, int lane) {
  if (!call.over_chosen) soften(logits, call.experts, lane);
  auto* keys = reinterpret_cast<uint32_t*>(logits);
  for (int e = lane; e < call.experts; e += 32) keys[e] = key_of(logits[e]);
  uint32_t key = 0;  // the largest of this lane, and its place
  int at = INT_MAX;
  const auto find_largest = [&] {
    key = 0, at = INT_MAX;
    for (int e = lane; e < call.experts; e += 32)
      if (keys[e] > key) key = keys[e], at = e;
  };
  find_largest();
  int id = 0;
  float score = 0;
  for (int i = 0; i < call.top; ++i) {
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, key);
    const int chosen = __reduce_min_sync(0xFFFFFFFFu, key == largest ? at : INT_MAX);
    if (lane == i) id = chosen, score = value_of(largest);
    if (at == chosen) {
      keys[chosen] = 0;
      find_largest();
    }
  }
  const float most = __shfl_sync(0xFFFFFFFFu, score, 0);
  if (call.over_chosen) score = expf(score - most);
  if (call.over_chosen || call.renormalized) score /= sum_of_lanes(lane < call.top ? score : 0, 32);
  if (lane >= call.top) return;
  call.ids[token * call.top + lane] = id;
  call.weights[token * call.top + lane] = call.rounded ? wide(narrow<T>(score)) : score;
}

template <class T>
__global__ void __launch_bounds__(32 * kRouteWarps) route_kernel(const __grid_constant__ RouteTokens call) {
  extern __shared__ float logits[];  // (tokens of this block, experts)
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = gridDim.x, rank = blockIdx.x;
  const int first = blockIdx.y * kRoutedTokens, tokens = min(kRoutedTokens, call.tokens - first);
  const int count = call.size / 8, experts_at_once = kRouteWarps * split;
  Eight<T> weight[kRouteEights];
  const auto load_weights = [&](int expert, int from) {
#pragma unroll
    for (int i = 0; i < kRouteEights; ++i) {
      const int at = from + 32 * i + lane;
      weight[i] = expert < call.experts && at < count ? eight<T>(call.weight, int64_t{expert} * count + at) : Eight<T>{};
    }
  };
  int expert = warp * split + rank;  // neighbours in different blocks, so that few experts keep all of them busy
  if (split > 1) cluster_arrive();
  let_dependents_start();
  load_weights(expert, 0);
  wait_for_earlier_kernels();
  if (split > 1) cluster_wait();  // all blocks have started

  for (; expert < call.experts; expert += experts_at_once) {
    const float bias = call.bias ? wide(static_cast<const T*>(call.bias)[expert]) : 0;
#pragma unroll 1
    for (int t = 0; t < tokens; ++t) {
      float sum = 0;
      for (int from = 0; from < count; from += kLoaded) {
        if (from || (t && count > kLoaded)) load_weights(expert, from);
        Eight<T> x[kRouteEights];
#pragma unroll
        for (int i = 0; i < kRouteEights; ++i) {
          const int at = from + 32 * i + lane;
          x[i] = at < count ? eight<T>(call.x, int64_t{first + t} * count + at) : Eight<T>{};
        }
#pragma unroll
        for (int i = 0; i < kRouteEights; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) sum = fmaf(x[i][j], weight[i][j], sum);
      }
      const float logit = wide(narrow<T>(sum_of_lanes(sum, 32) + bias));
      float* to = logits + t / split * call.experts + expert;
      if (lane == 0) split > 1 ? store_remote(logit, to, t % split) : void(*to = logit);
    }
    load_weights(expert + experts_at_once, 0);
  }
  split > 1 ? cluster_sync() : __syncthreads();
  for (int t = warp; t * split + rank < tokens; t += kRouteWarps)
    choose_experts<T>(call, logits + t * call.experts, first + t * split + rank, lane);
}

}  // namespace qload::cuda
