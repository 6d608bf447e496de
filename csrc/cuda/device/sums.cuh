// Addition of the sums of a block's warps and of a cluster's blocks, in an order independent of timing, and the store.
#pragma once

#include "barrier.cuh"
#include "cluster.cuh"
#include "division.h"
#include "number.cuh"
#include "ptx.cuh"

namespace qload::cuda {

/// y (tokens, outputs) = bias + unit * sum for four neighbouring columns. `whole`: `outputs` is a multiple of 4.
template <class T, bool whole>
__device__ __forceinline__ void put(const void* bias, void* y, int outputs, int m, int n, float4 sums, float unit) {
  if (whole && n >= outputs) return;
  const float values[4] = {sums.x, sums.y, sums.z, sums.w};
  __align__(8) T rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool biased = bias && (whole || n + i < outputs);
    rounded[i] = narrow<T>(values[i] * unit + (biased ? wide(static_cast<const T*>(bias)[n + i]) : 0));
  }
  T* to = static_cast<T*>(y) + int64_t{m} * outputs + n;
  if constexpr (!whole)
    if (outputs % 4 || n >= outputs) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i < outputs) to[i] = rounded[i];
      return;
    }
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(rounded);
}

/// Sum of all warps of a tile for four columns of a token; `at`: the first warp's.
__device__ __forceinline__ float4 of_warps(const Division& work, const unsigned char* at, int warp_bytes) {
  float4 total = *reinterpret_cast<const float4*>(at);
#pragma unroll 5
  for (int w = 1; w < work.row_warps; ++w)
    add(total, *reinterpret_cast<const float4*>(at + w * work.columns * warp_bytes));
  return total;
}

/// Number of groups of four sums in a block: columns i % 16 of tile i / 16 % columns, token i / 16 / columns.
__device__ __forceinline__ int fours_of(const Division& work, int tokens) { return work.columns * (kTileN / 4) * tokens; }

/// Buffer for sums from other blocks of the cluster; the barrier that counts them is behind it.
__device__ __forceinline__ float4* room_of(const Division& work, unsigned char* memory) {
  return reinterpret_cast<float4*>(memory + work.room_at);
}
__device__ __forceinline__ uint64_t* barrier_of_sums(const Division& work, int tokens, unsigned char* memory) {
  return reinterpret_cast<uint64_t*>(room_of(work, memory) + fours_of(work, tokens));
}

/// Prepare the barrier for sums from other blocks. Every block of a cluster does so before it waits for earlier kernels.
__device__ __forceinline__ void expect_sums(const Division& work, int tokens, unsigned char* memory) {
  if (work.split == 1) return;
  if (threadIdx.x == 0) {
    const int share = fours_of(work, tokens) / work.split;
    uint64_t* arrived = barrier_of_sums(work, tokens, memory);
    start_barrier(arrived, 1);
    publish_barriers();
    expect_bytes(arrived, (work.split - 1) * share * 16);
  }
  cluster_arrive();
}

/// Add sums of all warps and store them. Each warp has stored its sums, fp32 (tokens, kSumPitch), in shared memory,
/// warps i, i + columns ... of a tile `warp_bytes` apart. Each block of a cluster stores a share of the columns, for
/// which the other blocks send it their sums. `put(m, n, sums)` stores four columns of a token from column n of the block.
template <class Put>
__device__ __forceinline__ void add_up(const Division& work, int tokens, unsigned char* memory, int warp_bytes,
                                       const Put& put) {
  __syncthreads();
  if (work.split > 1) cluster_wait();  // all blocks have started

  const int count = fours_of(work, tokens), share = count / work.split, first = work.split > 1 ? blockIdx.x * share : 0;
  const auto with_own = [&](int i, const auto& use) {
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    const unsigned char* at = memory + tile * warp_bytes + (m * kSumPitch + i % 16 * 4) * 4;
    use(m, tile * kTileN + i % 16 * 4, of_warps(work, at, warp_bytes));
  };
  float4* room = room_of(work, memory);  // a share for each block
  uint64_t* arrived = barrier_of_sums(work, tokens, memory);
  for (int other = threadIdx.x; other < count - share; other += blockDim.x) {
    const int i = other < first ? other : other + share, rank = i / share;
    with_own(i, [&](int, int, float4 own) {
      send(own, remote_address(room + first + i - rank * share, rank), remote_address(arrived, rank));
    });
  }
  for (int i = threadIdx.x; i < share; i += blockDim.x)
    with_own(first + i, [&](int m, int n, float4 own) {
      if (work.split == 1) return put(m, n, own);
      wait_for_cluster(arrived, 0);
      float4 total = blockIdx.x == 0 ? own : room[i];
      for (int rank = 1; rank < work.split; ++rank) add(total, rank == blockIdx.x ? own : room[rank * share + i]);
      put(m, n, total);
    });
}

}  // namespace qload::cuda
