// Attention of one new token of each sequence over its keys and values in pages of a cache.
//
//   score[n] = scale * sum_d q[d] * key[n, d]           first <= n <= position; first: of the window and of the chunk
//   y[d]     = rounded(sum_n exp(score[n]) * value[n, d] / (sum_n exp(score[n]) + exp(sink)))
//
//   in, out  see AttendPages in step.h; key n of sequence s is in page table[s, n / page_size]
//   needs    sizes and pitches % 8 == 0, sizes at most 256; keys, values, q and y aligned to 16 bytes; a page outside of
//            the cache stops the device
//   grid     (split, kv * tiles, sequences), kAttendWarps warps. A block has kHeads queries of one head of keys, and a
//            cluster of `split` blocks divides the keys. kLanes lanes read a key and its value, 16 bytes each; each run of
//            kLanes lanes takes every n-th key, kTogether at a time, with its own maximum and sums
//   Sums of runs are rescaled to one maximum and added in the order of warps and then of blocks, independent of timing.
//   Only visible keys are read. For few tokens latency is the limit: position, page, key, one after another.
//
// Equals `attend` (qload/models/attention.py) in fp32, rounded once.
#pragma once

#include <cfloat>

#include "../device/cluster.cuh"
#include "eight.cuh"
#include "step.h"

namespace qload::cuda {

constexpr int kAttendWarps = 8, kTogether = 4, kMostSplit = 8;
constexpr float kLog2E = 1.4426950408889634f;

/// Offsets of partial results in a block's shared memory, in floats.
struct AttendRoom {
  int columns, sums, stats, from_blocks, stats_of_blocks, total;

/// `heads` with `size` numbers each.
  __host__ __device__ AttendRoom(int heads, int size, int split) {
    columns = heads * size;
    sums = 0;                                        // (warps, heads, size)
    from_blocks = kAttendWarps * columns;            // (share of four columns, split, 4)
    stats = from_blocks + columns + 4 * split;       // (warps, heads, 2): maximum, sum of weights
    stats_of_blocks = stats + kAttendWarps * heads * 2;  // (split, heads, 4)
    total = stats_of_blocks + split * heads * 4;
  }
};

/// The maximum to subtract: 0 without keys, since -inf - -inf is NaN.
__device__ __forceinline__ float base_of(float most) { return most == -INFINITY ? 0 : most; }

/// Sum of the weights of keys relative to their maximum, and sums of `kCount` values.
template <int kCount>
struct WeightedSums {
  float most = -INFINITY, total = 0, sums[kCount] = {};

  __device__ __forceinline__ void add(float its_most, float its_total, const float (&its)[kCount]) {
    const float now = fmaxf(most, its_most), own = exp2f(most - base_of(now)), other = exp2f(its_most - base_of(now));
    most = now, total = total * own + its_total * other;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = sums[i] * own + its[i] * other;
  }
};

/// The visible keys of a token: first to last.
struct VisibleKeys {
  int first, last;

  __device__ __forceinline__ VisibleKeys(const AttendPages& call, int64_t at) {
    const int64_t there = int64_t{call.page_size} * call.width;
    int64_t from = 0;
    if (call.window) from = max(from, at - call.window + 1);
    if (call.chunk) from = max(from, at / call.chunk * call.chunk);
    first = static_cast<int>(min(from, there)), last = static_cast<int>(min(at, there - 1));
  }
};

/// Queries of a block, scaled so that products are exponents of two; zeros beyond the last.
template <class T, int kHeads>
__device__ __forceinline__ void load_queries(const AttendPages& call, int first_head, int heads, int lane,
                                             float (&q)[kHeads][8]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    Eight<T> one = {};
    const int64_t row = int64_t{blockIdx.z} * call.heads + first_head + h;
    if (h < heads && 8 * lane < call.k_size) one = eight<T>(call.q, row * (call.k_size / 8) + lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) q[h][i] = one[i] * (call.scale * kLog2E);
  }
}

/// Add kCount keys of a run to earlier sums, from key n on, `step` apart.
template <class T, int kHeads, int kLanes, int kCount>
__device__ __forceinline__ void add_keys(const AttendPages& call, const int64_t* table, int head, int lane, int n, int step,
                                      int last, const float (&q)[kHeads][8], WeightedSums<8> (&found)[kHeads]) {
  Eight<T> key[kCount] = {}, value[kCount] = {};
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const int at = n + u * step;
    if (at > last) continue;
    const int64_t page = table[at / call.page_size];
    if (page < 0 || page >= call.pages) __trap();
    const int64_t row = (page * call.page_size + at % call.page_size) * call.kv + head;
    if (8 * lane < call.k_size) key[u] = eight<T>(call.keys, row * (call.k_pitch / 8) + lane);
    if (8 * lane < call.v_size) value[u] = eight<T>(call.values, row * (call.v_pitch / 8) + lane);
  }
  float scores[kHeads][kCount] = {};
#pragma unroll
  for (int u = 0; u < kCount; ++u)
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) scores[h][u] = fmaf(q[h][i], key[u][i], scores[h][u]);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float now = found[h].most;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      scores[h][u] = sum_of_lanes(scores[h][u], kLanes);
      if (n + u * step > last) scores[h][u] = -INFINITY;
      now = fmaxf(now, scores[h][u]);
    }
    const float kept = exp2f(found[h].most - base_of(now));
    found[h].most = now, found[h].total *= kept;
#pragma unroll
    for (int i = 0; i < 8; ++i) found[h].sums[i] *= kept;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const float weight = exp2f(scores[h][u] - base_of(now));
      found[h].total += weight;
#pragma unroll
      for (int i = 0; i < 8; ++i) found[h].sums[i] = fmaf(weight, value[u][i], found[h].sums[i]);
    }
  }
}

/// Combine the runs of a warp; all of them get the result.
template <int kLanes>
__device__ __forceinline__ void add_runs(WeightedSums<8>& found) {
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) {
    float its[8];
    const float its_most = __shfl_xor_sync(0xFFFFFFFFu, found.most, step);
    const float its_total = __shfl_xor_sync(0xFFFFFFFFu, found.total, step);
#pragma unroll
    for (int i = 0; i < 8; ++i) its[i] = __shfl_xor_sync(0xFFFFFFFFu, found.sums[i], step);
    found.add(its_most, its_total, its);
  }
}

/// Store y of four columns from the sums of all keys.
template <class T>
__device__ __forceinline__ void store_four(const AttendPages& call, int head, int column, const WeightedSums<4>& found) {
  float total = found.total, kept = 1;
  if (call.sinks) {
    const float sink = call.sinks[head] * kLog2E, base = base_of(fmaxf(found.most, sink));
    kept = exp2f(found.most - base), total = total * kept + exp2f(sink - base);
  }
  __align__(8) T four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = narrow<T>(found.sums[i] * kept / total);
  T* to = static_cast<T*>(call.y) + (int64_t{blockIdx.z} * call.heads + head) * call.v_size + column;
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(four);
}

/// Combine the warps' sums of four columns, numbers 4 i to 4 i + 3 of the block.
__device__ __forceinline__ WeightedSums<4> of_all_warps(const float* memory, const AttendRoom& room, int i, int heads,
                                                   int head) {
  WeightedSums<4> found;
#pragma unroll
  for (int w = 0; w < kAttendWarps; ++w) {
    const float* stats = memory + room.stats + (w * heads + head) * 2;
    const float4 four = *reinterpret_cast<const float4*>(memory + room.sums + w * room.columns + 4 * i);
    found.add(stats[0], stats[1], {four.x, four.y, four.z, four.w});
  }
  return found;
}

template <class T, int kHeads, int kLanes>
__global__ void __launch_bounds__(32 * kAttendWarps) attend_kernel(const __grid_constant__ AttendPages call) {
  extern __shared__ __align__(16) float memory[];
  const int group = call.heads / call.kv, tiles = (group + kHeads - 1) / kHeads;
  const int head = blockIdx.y / tiles, tile = blockIdx.y % tiles, split = gridDim.x;
  const int first_head = head * group + tile * kHeads, heads = min(kHeads, group - tile * kHeads);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / 32;
  const AttendRoom room(kHeads, call.v_size, split);
  if (split > 1) cluster_arrive();
  let_dependents_start();
  wait_for_earlier_kernels();

  const VisibleKeys seen(call, call.positions[blockIdx.z]);
  const int64_t* table = call.table + int64_t{blockIdx.z} * call.width;
  float q[kHeads][8];
  load_queries<T>(call, first_head, heads, lane, q);
  WeightedSums<8> found[kHeads];
  constexpr int kRuns = 32 / kLanes;
  const int step = split * kAttendWarps * kRuns;
  for (int n = seen.first + (blockIdx.x * kAttendWarps + warp) * kRuns; n <= seen.last; n += step * kTogether) {
    const int own = n + threadIdx.x % 32 / kLanes;
    if (n + step > seen.last)  // of a short text a run has one key
      add_keys<T, kHeads, kLanes, 1>(call, table, head, lane, own, step, seen.last, q, found);
    else
      add_keys<T, kHeads, kLanes, kTogether>(call, table, head, lane, own, step, seen.last, q, found);
  }

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    add_runs<kLanes>(found[h]);
    if (threadIdx.x % 32 >= kLanes) continue;
    if (lane == 0) {
      float* stats = memory + room.stats + (warp * kHeads + h) * 2;
      stats[0] = found[h].most, stats[1] = found[h].total;
    }
    if (8 * lane >= call.v_size) continue;
    float4* to = reinterpret_cast<float4*>(memory + room.sums + warp * room.columns + h * call.v_size + 8 * lane);
    to[0] = make_float4(found[h].sums[0], found[h].sums[1], found[h].sums[2], found[h].sums[3]);
    to[1] = make_float4(found[h].sums[4], found[h].sums[5], found[h].sums[6], found[h].sums[7]);
  }
  __syncthreads();
  if (split > 1) cluster_wait();  // all blocks have started

  const int count = heads * call.v_size / 4;
  const auto* from_blocks = reinterpret_cast<const float4*>(memory + room.from_blocks);
  const auto* stats_of_blocks = reinterpret_cast<const float4*>(memory + room.stats_of_blocks);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int h = 4 * i / call.v_size;
    const WeightedSums<4> all = of_all_warps(memory, room, i, kHeads, h);
    if (split == 1) {
      store_four<T>(call, first_head + h, 4 * i % call.v_size, all);
      continue;
    }
    const float4 four = make_float4(all.sums[0], all.sums[1], all.sums[2], all.sums[3]);
    store_remote(four, from_blocks + i / split * split + blockIdx.x, i % split);
    if (4 * i % call.v_size == 0)
      for (int rank = 0; rank < split; ++rank)
        store_remote(make_float4(all.most, all.total, 0, 0), stats_of_blocks + blockIdx.x * kHeads + h, rank);
  }
  if (split == 1) return;
  cluster_sync();
  for (int i = threadIdx.x * split + blockIdx.x; i < count; i += blockDim.x * split) {
    const int h = 4 * i / call.v_size;
    WeightedSums<4> all;
    for (int rank = 0; rank < split; ++rank) {
      const float4 four = from_blocks[i / split * split + rank], stats = stats_of_blocks[rank * kHeads + h];
      all.add(stats.x, stats.y, {four.x, four.y, four.z, four.w});
    }
    store_four<T>(call, first_head + h, 4 * i % call.v_size, all);
  }
}

}  // namespace qload::cuda
