// What becomes of a block's sums: those of two blocks are added, and y or a part of it is stored.
//
// A lane has of each strip of 16 columns sums of columns c and c + 8 of tokens 2t, 2t + 1 of each eight tokens: four of
// an eight one after another, columns of a token apart.
#pragma once

#include "../device/number.cuh"
#include "../device/wgmma.cuh"
#include "ring.cuh"

namespace qload::cuda::many_room {

/// A sum is what stands here times the unit of its column, c or c + 8.
template <int strips, int eights>
struct Sums {
  float of[strips][eights * 4], unit[strips][2];
};

/// Where a lane's sums are in its block: the column of its first strip, its first token, and the first of all lanes.
struct Share {
  int column, token, first;
};

/// Of two blocks that have sums of the same place, each keeps one half of the eights, the second the later, and gets
/// the other's. `there`: a place in the shared memory of both that no copy goes to, `came` a barrier for it.
template <int rank, int strips, int eights>
__device__ __forceinline__ Sums<strips, eights / 2> halved(const Sums<strips, eights>& all, float4* there, uint64_t* came) {
  constexpr int half = eights / 2, sends = rank ? 0 : half, keeps = half - sends, threads = kMultiply;
  barrier_of<threads>();  // nobody here reads the rings any more,
  if (threadIdx.x == 0) expect_bytes(came, strips * half * threads * 16);
  cluster_arrive();
  cluster_wait();  // nor in the other block
  const uint32_t to = address_in(there + threadIdx.x, 1 - rank), its_barrier = address_in(came, 1 - rank);
  Sums<strips, half> kept;
#pragma unroll
  for (int i = 0; i < strips * half; ++i) {
    const float* at = all.of[i / half] + 4 * (i % half + sends);
    const float first = all.unit[i / half][0], second = all.unit[i / half][1];
    send(make_float4(at[0] * first, at[1] * first, at[2] * second, at[3] * second), to + i * threads * 16, its_barrier);
  }
  wait_for_cluster(came, 0);
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    kept.unit[j][0] = kept.unit[j][1] = 1;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float4 other = there[(j * half + i) * threads + threadIdx.x];
      const float* own = all.of[j] + 4 * (i + keeps);
      float* sum = kept.of[j] + 4 * i;
      sum[0] = fmaf(own[0], all.unit[j][0], other.x), sum[1] = fmaf(own[1], all.unit[j][0], other.y);
      sum[2] = fmaf(own[2], all.unit[j][1], other.z), sum[3] = fmaf(own[3], all.unit[j][1], other.w);
    }
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
      if (m < call.M) parts[int64_t{m} * call.N + n + i / 2 % 2 * 8] = sums.of[j][i] * sums.unit[j][i / 2 % 2];
    }
  }
}

/// y of 16 tokens by 64 columns at a time, through shared memory, so that a token's are written together. Each group of
/// four warps has room for two, and fills one while the other is read; of a row's eights each lies in another bank.
/// `whole`: outputs are a multiple of 8.
template <class T, bool whole, int strips, int eights, class OwnRows>
__device__ __forceinline__ void store(const Many& call, const Place& place, const OwnRows& rows, const Share& share,
                                      T* room, const Sums<strips, eights>& sums) {
  constexpr int turns = eights * 8 / kTurnTokens;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const int own_row = lane / 16 * 8 + lane % 8, row = thread / 8;
  const int own = own_row * kTile + (thread / 32 * 2 + lane / 8 % 2 ^ own_row % 8) * 8;
  const int from = row * kTile + (thread % 8 ^ row % 8) * 8;
  const int first = rows.first() + share.first + row, left = rows.end() - first;
  room += group * 2 * kTurnTokens * kTile;
  uint4 values;
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    const int n = place.column + share.column + j * kTile;
    const int to_n = place.column + (group * strips + j) * kTile + thread % 8 * 8, there = call.outputs - to_n;
    T* to = static_cast<T*>(call.y) + int64_t{first} * call.outputs + to_n;
    const auto put = [&](int turn) {
      if (there <= 0 || turn * kTurnTokens >= left) return;
      T* at = to + int64_t{turn * kTurnTokens} * call.outputs;
      if constexpr (whole)
        __stcg(reinterpret_cast<uint4*>(at), values);
      else
#pragma unroll 1
        for (int i = 0; i < min(8, there); ++i) at[i] = room[(j * turns + turn) % 2 * kTurnTokens * kTile + from + i];
    };
    float bias[2] = {};
#pragma unroll
    for (int b = 0; b < 2; ++b)
      if (call.bias && n + 8 * b < call.outputs)
        bias[b] = wide(static_cast<const T*>(call.bias)[int64_t{rows.expert()} * call.outputs + n + 8 * b]);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = sums.of[j] + 4 * (2 * turn + i / 2) + 2 * (i % 2);
        const float unit = sums.unit[j][i % 2];
        pairs[i] = narrow<T>(fmaf(two[0], unit, bias[i % 2]), fmaf(two[1], unit, bias[i % 2]));
      }
      T* shared = room + (j * turns + turn) % 2 * kTurnTokens * kTile;
      store_turned(shared + own, pairs);
      if (turn > 0) put(turn - 1);  // while these are on their way
      barrier_of<128>(1 + group);
      values = *reinterpret_cast<const uint4*>(shared + from);
    }
    put(turns - 1);
  }
  if (strips * turns % 2) barrier_of<128>(1 + group);  // the next tile begins with the same room
}

/// A block's sums, and those of the block that shares its rows, become y or a part of it.
template <class T, int strips, int eights, class OwnRows>
__device__ __forceinline__ void finish(const Many& call, const Place& place, const OwnRows& rows, Share share,
                                       unsigned char* memory, T* room, uint64_t* came, const Sums<strips, eights>& sums) {
  const auto put = [&](const auto& own) {
    if (call.slices > 1)
      store_part(call, place, rows.first(), share, own);
    else if (call.outputs % 8 == 0)
      store<T, true>(call, place, rows, share, room, own);
    else
      store<T, false>(call, place, rows, share, room, own);
  };
  if (!place.shares_rows) return put(sums);
  share.first = blockIdx.x * eights * 4, share.token += share.first;
  if (blockIdx.x == 0)
    put(halved<0>(sums, reinterpret_cast<float4*>(memory), came));
  else
    put(halved<1>(sums, reinterpret_cast<float4*>(memory), came));
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
