// What becomes of a block's sums: rounded and written, or shared out among the blocks that have parts of them.
#pragma once

#include "../device/ring.cuh"
#include "../device/wgmma.cuh"
#include "lane.cuh"
#include "middle.h"

namespace qload::cuda::middle_room {

constexpr int kMostSplit = 8;

template <class T>
__device__ __forceinline__ float bias_of(const Middle& call, int n) {
  return call.bias && n < call.outputs ? wide(static_cast<const T*>(call.bias)[n]) : 0.0f;
}

/// All of y that the block has, through shared memory, so that neighbours are written together.
template <class T, int tokens, int strips, int columns>
__device__ __forceinline__ void store(const Middle& call, const Place<strips>& place, T* shared,
                                      const float (&sum)[strips][tokens / 2]) {
  constexpr int pitch = columns + 8;
  const int first_n = blockIdx.z * columns, first_m = blockIdx.y * tokens;
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    const int column = place.column(j), lane = place.lane;
    const float bias[2] = {bias_of<T>(call, first_n + column + lane / 4),
                           bias_of<T>(call, first_n + column + lane / 4 + 8)};
#pragma unroll
    for (int eight = 0; eight < tokens / 8; eight += 2) {
      uint32_t parts[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &sum[j][4 * (eight + i / 2) + 2 * (i % 2)];
        parts[i] = as<uint16_t>(narrow<T>(two[0] + bias[i % 2])) | as<uint16_t>(narrow<T>(two[1] + bias[i % 2])) << 16;
      }
      store_turned(shared + (8 * (eight + lane / 16) + lane % 8) * pitch + column + lane / 8 % 2 * 8, parts);
    }
  }
  barrier_of<kMultiply>();
  const bool whole = call.outputs % 8 == 0;
  for (int i = threadIdx.x; i < tokens * columns / 8; i += kMultiply) {
    const int m = i / (columns / 8), at = i % (columns / 8) * 8, n = first_n + at;
    if (first_m + m >= call.M || n >= call.outputs) continue;
    const T* from = shared + m * pitch + at;
    T* to = static_cast<T*>(call.y) + static_cast<int64_t>(first_m + m) * call.outputs + n;
    if (whole)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int j = 0; j < min(8, call.outputs - n); ++j) to[j] = from[j];
  }
}

/// A share of y: every block of the cluster lays its sums out, and adds those of one share in the blocks' order.
template <class T, int tokens, int strips, int columns>
__device__ __forceinline__ void store_share(const Middle& call, int split, const Place<strips>& place, float4* shared,
                                            const float (&sum)[strips][tokens / 2]) {
  constexpr int eights = tokens / 8, count = strips * eights;
  float4* own = shared + threadIdx.x;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float* four = &sum[i / eights][i % eights * 4];
    own[i * kMultiply] = make_float4(four[0], four[1], four[2], four[3]);
  }
  cluster_barrier();
  const int last = count * (blockIdx.x + 1) / split;
  for (int i = count * blockIdx.x / split; i < last; ++i) {
    float4 part[kMostSplit];
#pragma unroll
    for (int rank = 0; rank < kMostSplit; ++rank)
      if (rank < split) part[rank] = load_from(own + i * kMultiply, rank);
    float value[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
#pragma unroll
    for (int rank = 1; rank < kMostSplit; ++rank)
      if (rank < split) {
        value[0] += part[rank].x, value[1] += part[rank].y;
        value[2] += part[rank].z, value[3] += part[rank].w;
      }
    const int n = blockIdx.z * columns + place.column(i / eights) + place.lane / 4;
    const int m = blockIdx.y * tokens + i % eights * 8 + place.lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int own_n = n + j / 2 * 8, own_m = m + j % 2;
      if (own_n < call.outputs && own_m < call.M)
        static_cast<T*>(call.y)[static_cast<int64_t>(own_m) * call.outputs + own_n] =
            narrow<T>(value[j] + bias_of<T>(call, own_n));
    }
  }
  cluster_barrier();  // nobody leaves before the others have read
}

}  // namespace qload::cuda::middle_room
