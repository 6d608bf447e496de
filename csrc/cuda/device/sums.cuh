// The sums of a block's warps, and then of a cluster's blocks, added in one order whoever comes first, and stored.
#pragma once

#include "cluster.cuh"
#include "division.h"
#include "number.cuh"
#include "ptx.cuh"

namespace qload::cuda {

/// y (tokens, outputs) = bias + unit * sum, of four neighbouring columns. `whole`: outputs come in fours.
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

/// Four columns of a token, of all warps of a tile; the first warp's lie `at`.
__device__ __forceinline__ float4 of_warps(const Division& work, const unsigned char* at, int warp_bytes) {
  float4 total = *reinterpret_cast<const float4*>(at);
#pragma unroll 5
  for (int w = 1; w < work.row_warps; ++w)
    add(total, *reinterpret_cast<const float4*>(at + w * work.columns * warp_bytes));
  return total;
}

/// Each warp has put its sums, fp32 (tokens, kSumPitch), into shared memory: those of tile i, i + columns ... after
/// each other, `warp_bytes` apart. `put(m, n, sums)` stores four columns of a token, the first the block's column n.
template <class Put>
__device__ __forceinline__ void add_up(const Division& work, int tokens, unsigned char* memory, int warp_bytes,
                                       const Put& put) {
  __syncthreads();
  if (work.split > 1) cluster_wait();  // all blocks have started

  // Four columns i % 16 of tile i / 16 % columns, of token i / 16 / columns.
  const int count = work.columns * (kTileN / 4) * tokens, share = count / work.split;
  float4* room = reinterpret_cast<float4*>(memory + work.room_at);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    const unsigned char* at = memory + tile * warp_bytes + (m * kSumPitch + i % 16 * 4) * 4;
    const float4 total = of_warps(work, at, warp_bytes);
    if (work.split == 1)
      put(m, tile * kTileN + i % 16 * 4, total);
    else
      store_there(total, room + blockIdx.x * share + i % share, i / share);
  }
  if (work.split == 1) return;
  cluster_sync();
  for (int i = blockIdx.x * share + threadIdx.x; i < (blockIdx.x + 1) * share; i += blockDim.x) {
    float4 total = room[i - blockIdx.x * share];
    for (int rank = 1; rank < work.split; ++rank) add(total, room[(rank - blockIdx.x) * share + i]);
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    put(m, tile * kTileN + i % 16 * 4, total);
  }
}

}  // namespace qload::cuda
