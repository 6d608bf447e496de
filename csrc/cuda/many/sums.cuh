// What becomes of a block's sums: those of two blocks are added, and y or a part of it is stored.
//
// A lane has of each strip of 16 columns sums of columns c and c + 8 of tokens 2t, 2t + 1 of each eight tokens: four of
// an eight one after another, columns of a token apart.
#pragma once

#include "../device/number.cuh"
#include "../device/wgmma.cuh"
#include "ring.cuh"

namespace qload::cuda::many_room {

template <int strips, int eights>
struct Sums {
  float of[strips][eights * 4];

  __device__ __forceinline__ float4 four(int strip, int eight) const {
    const float* at = of[strip] + 4 * eight;
    return make_float4(at[0], at[1], at[2], at[3]);
  }
};

/// Columns of a lane's first strip and its first token, from the block's; tokens that the block stores.
struct Share {
  int column, token;  // of a lane
  int first, count;
};

/// Of two blocks that have sums of the same place, each keeps one half of the eights, the second the later, and gets
/// the other's. `there`: a place in the shared memory of both that no copy goes to.
template <int strips, int eights>
__device__ __forceinline__ Sums<strips, eights / 2> halved(const Sums<strips, eights>& all, int rank, float4* there) {
  constexpr int half = eights / 2, threads = kMultiply;
  Sums<strips, half> kept;
  cluster_barrier();  // the other block has no use for its rings either
#pragma unroll
  for (int i = 0; i < strips * half; ++i) {
    const float4 low = all.four(i / half, i % half), high = all.four(i / half, i % half + half);
    store_there(rank ? low : high, there + i * threads + threadIdx.x, 1 - rank);
    float* to = kept.of[i / half] + 4 * (i % half);
    to[0] = rank ? high.x : low.x, to[1] = rank ? high.y : low.y;
    to[2] = rank ? high.z : low.z, to[3] = rank ? high.w : low.w;
  }
  cluster_barrier();
#pragma unroll
  for (int i = 0; i < strips * half; ++i) {
    const float4 other = there[i * threads + threadIdx.x];
    float* to = kept.of[i / half] + 4 * (i % half);
    to[0] += other.x, to[1] += other.y, to[2] += other.z, to[3] += other.w;
  }
  return kept;
}

/// A part of y, in fp32.
template <int strips, int eights>
__device__ __forceinline__ void store_part(const Many& call, const Place& place, int first_token, const Share& share,
                                           const Sums<strips, eights>& sums) {
  float* parts = static_cast<float*>(call.parts) + int64_t{place.slice} * call.M * call.N;
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    const int n = place.column + share.column + j * kTile;
    if (n >= call.N) continue;
#pragma unroll
    for (int i = 0; i < eights * 4; ++i) {
      const int m = first_token + share.token + i / 4 * 8 + i % 2;
      if (m < call.M) parts[int64_t{m} * call.N + n + i / 2 % 2 * 8] = sums.of[j][i];
    }
  }
}

/// y, through shared memory, so that neighbours are written together.
template <class T, int columns, int strips, int eights, class OwnRows>
__device__ __forceinline__ void store(const Many& call, const Place& place, const OwnRows& rows, const Share& share,
                                      T* shared, const Sums<strips, eights>& sums) {
  constexpr int pitch = columns + 8, threads = kMultiply;
  const int lane = threadIdx.x % 32, column = share.column - lane / 4, token = share.token - lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    const int n = place.column + share.column + j * kTile;
    float bias[2] = {};
#pragma unroll
    for (int b = 0; b < 2; ++b)
      if (call.bias && n + 8 * b < call.outputs)
        bias[b] = wide(static_cast<const T*>(call.bias)[int64_t{rows.expert()} * call.outputs + n + 8 * b]);
#pragma unroll
    for (int eight = 0; eight < eights; eight += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = sums.of[j] + 4 * (eight + i / 2) + 2 * (i % 2);
        pairs[i] = as<uint16_t>(narrow<T>(two[0] + bias[i % 2])) | as<uint16_t>(narrow<T>(two[1] + bias[i % 2])) << 16;
      }
      store_turned(shared + (token + 8 * (eight + lane / 16) + lane % 8) * pitch + column + j * kTile + lane / 8 % 2 * 8,
                   pairs);
    }
  }
  barrier_of<threads>();
  const bool whole = call.outputs % 8 == 0;
  constexpr int eights_of_row = columns / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < share.count * eights_of_row; i += threads) {
    const int own = share.first + i / eights_of_row, at = i % eights_of_row * 8;
    const int m = rows.first() + own, n = place.column + at;
    if (m >= rows.end() || n >= call.outputs) continue;
    const T* from = shared + own * pitch + at;
    T* to = static_cast<T*>(call.y) + int64_t{m} * call.outputs + n;
    if (whole)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int j = 0; j < min(8, call.outputs - n); ++j) to[j] = from[j];
  }
}

/// A block's sums, and those of the block that shares its rows, become y or a part of it.
template <class T, int columns, int strips, int eights, class OwnRows>
__device__ __forceinline__ void finish(const Many& call, const Place& place, const OwnRows& rows, Share share,
                                       unsigned char* memory, const Sums<strips, eights>& sums) {
  const auto put = [&](const auto& own, unsigned char* room) {
    if (call.slices > 1)
      store_part(call, place, rows.first(), share, own);
    else
      store<T, columns>(call, place, rows, share, reinterpret_cast<T*>(room), own);
  };
  if (!call.pairs) return put(sums, memory);
  const int rank = blockIdx.x;
  const auto kept = halved(sums, rank, reinterpret_cast<float4*>(memory));
  share.count /= 2, share.first = rank * share.count, share.token += share.first;
  put(kept, memory + strips * eights / 2 * kMultiply * 16);
}

constexpr int kAddThreads = 128;

/// y of all slices: a thread adds four columns of a token in the order of the slices. A block needs few enough registers
/// to wait beside one whose sums these are.
template <class T>
__global__ void __launch_bounds__(kAddThreads) add_slices(const __grid_constant__ Many call) {
  let_dependents_start();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kAddThreads + threadIdx.x, apart = int64_t{call.M} * call.N;
  const int m = static_cast<int>(i / (call.N / 4)), n = static_cast<int>(i % (call.N / 4)) * 4;
  if (m >= call.M || n >= call.outputs) return;
  const float* from = static_cast<const float*>(call.parts) + i * 4;
  float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 4
  for (int slice = 1; slice < call.slices; ++slice) add(sum, *reinterpret_cast<const float4*>(from + slice * apart));
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  __align__(8) T rounded[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool biased = call.bias && n + j < call.outputs;
    rounded[j] = narrow<T>(values[j] + (biased ? wide(static_cast<const T*>(call.bias)[n + j]) : 0.0f));
  }
  T* to = static_cast<T*>(call.y) + int64_t{m} * call.outputs + n;
  if (call.outputs % 4 == 0)
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(rounded);
  else
    for (int j = 0; j < min(4, call.outputs - n); ++j) to[j] = rounded[j];
}

}  // namespace qload::cuda::many_room
