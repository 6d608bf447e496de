// The sums of a block's warps, and then of a cluster's blocks, added in one order whoever comes first, and stored.
#pragma once

#include "../device/ptx.cuh"
#include "../w4a16/weights.cuh"
#include "decode.h"
#include "division.h"

namespace qload::cuda {

/// y = bias + unit * sum of four neighbouring columns.
template <class T>
__device__ __forceinline__ void put(const Decode& call, int m, int n, float4 sums, float unit) {
  const float values[4] = {sums.x, sums.y, sums.z, sums.w};
  __align__(8) T rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool biased = call.bias && n + i < call.outputs;
    rounded[i] = narrow<T>(values[i] * unit + (biased ? wide(static_cast<const T*>(call.bias)[n + i]) : 0));
  }
  T* to = static_cast<T*>(call.y) + int64_t{m} * call.outputs + n;
  if (call.outputs % 4 == 0 && n < call.outputs) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(rounded);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (n + i < call.outputs) to[i] = rounded[i];
}

/// A warp's sums of its 64 columns lie where its x was.
template <class T, int token_tiles>
__device__ __forceinline__ void add_up(const Decode& call, const Division& work, const float (&sum)[4][token_tiles][4],
                                       unsigned char* memory, int warp_bytes, float unit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_warps = blockDim.x / 32 / work.columns;
  if (work.split > 1) cluster_wait();  // all blocks have started
  float* own = reinterpret_cast<float*>(memory + warp * warp_bytes) + lane % 4 * 2 * kSumPitch + lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * m + lane % 4 * 2 + i % 2 < call.M)
          own[(8 * m + i % 2) * kSumPitch + 16 * j + 8 * (i / 2)] = sum[j][m][i];
  __syncthreads();

  // Four columns i % 16 of tile i / 16 % columns, of token i / 16 / columns.
  const int count = work.columns * (kTileN / 4) * call.M, share = count / work.split;
  float4* room = reinterpret_cast<float4*>(memory + work.room_at);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    const unsigned char* at = memory + tile * warp_bytes + (m * kSumPitch + i % 16 * 4) * 4;
    float4 total = *reinterpret_cast<const float4*>(at);
#pragma unroll 5
    for (int w = 1; w < row_warps; ++w)
      add(total, *reinterpret_cast<const float4*>(at + w * work.columns * warp_bytes));
    if (work.split == 1)
      put<T>(call, m, (blockIdx.y * work.columns + tile) * kTileN + i % 16 * 4, total, unit);
    else
      store_there(total, room + blockIdx.x * share + i % share, i / share);
  }
  if (work.split == 1) return;
  cluster_sync();
  for (int i = blockIdx.x * share + threadIdx.x; i < (blockIdx.x + 1) * share; i += blockDim.x) {
    float4 total = room[i - blockIdx.x * share];
    for (int rank = 1; rank < work.split; ++rank) add(total, room[(rank - blockIdx.x) * share + i]);
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    put<T>(call, m, (blockIdx.y * work.columns + tile) * kTileN + i % 16 * 4, total, unit);
  }
}

}  // namespace qload::cuda
