// The sums of a block's warps, and then of a cluster's blocks, added in one order whoever comes first, and stored.
#pragma once

#include "../device/ptx.cuh"
#include "../w4a16/weights.cuh"
#include "division.h"
#include "exllama.h"

namespace qload::cuda::exl {

/// y = bias + unit * sum of four neighbouring columns.
template <class T>
__device__ __forceinline__ void put(const Exllama& call, int m, int n, float4 sums, float unit) {
  if (n >= call.N) return;
  const float values[4] = {sums.x, sums.y, sums.z, sums.w};
  __align__(8) T rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    rounded[i] = narrow<T>(values[i] * unit + (call.bias ? wide(static_cast<const T*>(call.bias)[n + i]) : 0));
  *reinterpret_cast<uint2*>(static_cast<T*>(call.y) + int64_t{m} * call.N + n) = *reinterpret_cast<const uint2*>(rounded);
}

/// Each warp has sums of 64 columns: of j and b the columns 32 (j / 2) + 4c + 2 (j % 2) + b, of i the token 2t + i.
template <class T, int token_tiles>
__device__ __forceinline__ void add_up(const Exllama& call, const Division& work, int first_token, int tokens,
                                       const float (&sum)[4][token_tiles][4], unsigned char* memory, float unit) {
  constexpr int own_size = 8 * token_tiles * kSumPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* sums = reinterpret_cast<float*>(memory);
  float* own = sums + warp * own_size + lane / 4 * 4;
#pragma unroll
  for (int m = 0; m < token_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * m + lane % 4 * 2 + i;
      if (token >= tokens) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float4*>(own + token * kSumPitch + 32 * half) =
            make_float4(sum[2 * half][m][i], sum[2 * half][m][2 + i], sum[2 * half + 1][m][i], sum[2 * half + 1][m][2 + i]);
    }
  __syncthreads();
  if (work.split > 1) cluster_wait();  // all blocks have started

  // Four columns i % 16 of tile i / 16 % columns, of token i / 16 / columns.
  const int count = work.columns * (kTileN / 4) * tokens, share = count / work.split;
  const int first = blockIdx.y * work.columns * kTileN;
  float4* room = reinterpret_cast<float4*>(memory + work.room_at);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    const float* at = sums + tile * own_size + m * kSumPitch + i % 16 * 4;
    float4 total = *reinterpret_cast<const float4*>(at);
#pragma unroll 5
    for (int w = 1; w < work.row_warps; ++w) add(total, *reinterpret_cast<const float4*>(at + w * work.columns * own_size));
    if (work.split == 1)
      put<T>(call, first_token + m, first + tile * kTileN + i % 16 * 4, total, unit);
    else
      store_there(total, room + blockIdx.x * share + i % share, i / share);
  }
  if (work.split == 1) return;
  cluster_sync();
  for (int i = blockIdx.x * share + threadIdx.x; i < (blockIdx.x + 1) * share; i += blockDim.x) {
    float4 total = room[i - blockIdx.x * share];
    for (int rank = 1; rank < work.split; ++rank) add(total, room[(rank - blockIdx.x) * share + i]);
    const int m = i / 16 / work.columns, tile = i / 16 - m * work.columns;
    put<T>(call, first_token + m, first + tile * kTileN + i % 16 * 4, total, unit);
  }
}

}  // namespace qload::cuda::exl
