// The sum of a tensor over the ranks of a machine, in one pass; with a residual, also its sum with it and the RMS norm.
//
//   sum[m]   = rounded(values of rank 0 + values of rank 1 + ...), in fp32, in the order of ranks
//   total[m] = rounded(x[m] + sum[m])
//   y[m]     = rounded(total[m] / sqrt(mean(total[m]**2) + eps) * weight)
//
//   in, out  see SumRanks in sum.h
//   needs    memory of all ranks (memory.h); all aligned to 16 bytes; the same calls in the same order on every rank
//   grid     a block for each row, or, without a norm, for each 256 or 1024 times eight numbers
//
// Every rank writes its values to the memory of every other one, and sums what it receives: the same bits everywhere.
// Short messages travel in lines of 16 bytes, of which half is the number of the sum: a store of 8 bytes arrives whole,
// so that a line with the right number is complete. Of long messages a block publishes its part by a flag.
//
// Nothing is ever reset. A sum has a number, which the last block of a launch advances, so that a graph can be replayed.
// Even and odd sums have memory of their own: a rank begins sum n + 2 after it received all of sum n + 1, which the others
// sent after their kernel of sum n ended. Numbers 0 and 1 are left out: memory starts with zeros, and parities alternate.
//
// The limit is a write across the link and its latency. Weights of the next layer are read meanwhile, by early starts.
#pragma once

#include "../step/eight.cuh"
#include "sum.h"

namespace qload::cuda {

constexpr int kMostSumEights = 4;  // of a thread
constexpr unsigned kTries = 4096;  // between two looks at `stop`

struct SumHeader {
  uint32_t number, ended;
};

__device__ __forceinline__ uint4 load_volatile(const uint4* at) {
  uint4 found;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(at)
               : "memory");
  return found;
}

__device__ __forceinline__ void store_volatile(uint4* at, uint4 value) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

/// Whether a rank is lost; looked up once in `kTries` calls.
__device__ __forceinline__ bool is_stopped(const PeerView& peers, unsigned tries) {
  return tries % kTries == kTries - 1 && *static_cast<const volatile int*>(peers.stop);
}

/// Store 8 numbers in the lines of this rank at another one.
__device__ __forceinline__ void send_line(unsigned char* lines, int64_t at, uint4 value, uint32_t number) {
  uint4* to = reinterpret_cast<uint4*>(lines) + at;
  store_volatile(to, {value.x, number, value.y, number});
  store_volatile(to + kLineBytes / 16, {value.z, number, value.w, number});
}

/// Wait for 8 numbers in the lines of another rank.
__device__ __forceinline__ uint4 receive_line(const PeerView& peers, const unsigned char* lines, int64_t at,
                                              uint32_t number) {
  const uint4* from = reinterpret_cast<const uint4*>(lines) + at;
  for (unsigned tries = 0;; ++tries) {
    const uint4 low = load_volatile(from), high = load_volatile(from + kLineBytes / 16);
    const bool arrived = low.y == number && low.w == number && high.y == number && high.w == number;
    if (arrived || is_stopped(peers, tries)) return {low.x, low.z, high.x, high.z};
  }
}

__device__ __forceinline__ void publish_flag(uint32_t* flag, uint32_t number) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}

__device__ __forceinline__ void wait_for_flag(const PeerView& peers, const uint32_t* flag, uint32_t number) {
  uint32_t found = 0;
  for (unsigned tries = 0; found != number && !is_stopped(peers, tries); ++tries)
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
}

/// `row`: eight numbers of a block.
template <class T, int kEights, bool kLines, bool kNorm>
__global__ void __launch_bounds__(kNorm ? 1024 : 256) sum_ranks_kernel(const __grid_constant__ SumRanks call, int row, int64_t all) {
  __shared__ float of_warps[32];
  const PeerView& peers = call.peers;
  unsigned char* const own = peers.at[peers.rank];
  auto* const header = reinterpret_cast<SumHeader*>(own);
  const int64_t start = int64_t{blockIdx.x} * row;
  const int count = static_cast<int>(min(static_cast<int64_t>(row), all - start));
  let_dependents_start();
  wait_for_earlier_kernels();

  const uint32_t last = *static_cast<const volatile uint32_t*>(&header->number);
  const uint32_t number = last + 1 < 2 ? 2 : last + 1;
  const int parity = number % 2;
  Eight<T> mine[kEights], x[kEights];
#pragma unroll
  for (int v = 0; v < kEights; ++v) {
    const int at = v * blockDim.x + threadIdx.x;
    if (at >= count) break;
    mine[v] = eight<T>(call.values, start + at);
    for (int step = 1; step < peers.world; ++step) {
      const int to = (peers.rank + step) % peers.world;
      if constexpr (kLines)
        send_line(peers.at[to] + peers.lines(parity, peers.rank), start + at, as<uint4>(mine[v]), number);
      else
        put(peers.at[to] + peers.data(parity, peers.rank), start + at, mine[v]);
    }
    if constexpr (kNorm) x[v] = eight<T>(call.x, start + at);
  }
  if constexpr (!kLines) {
    __syncthreads();  // the block has stored its part
    const int other = threadIdx.x;
    if (other < peers.world && other != peers.rank) {
      const auto flag = [&](int at, int from) {
        return reinterpret_cast<uint32_t*>(peers.at[at] + peers.flags(parity, from)) + blockIdx.x;
      };
      publish_flag(flag(other, peers.rank), number);
      wait_for_flag(peers, flag(peers.rank, other), number);
    }
    __syncthreads();
  }

  float squares = 0;
#pragma unroll
  for (int v = 0; v < kEights; ++v) {
    const int at = v * blockDim.x + threadIdx.x;
    if (at >= count) break;
    float sums[8];
    for (int rank = 0; rank < peers.world; ++rank) {
      Eight<T> term = mine[v];
      if (rank != peers.rank) {
        if constexpr (kLines)
          term = as<Eight<T>>(receive_line(peers, own + peers.lines(parity, rank), start + at, number));
        else
          term = as<Eight<T>>(load_volatile(reinterpret_cast<const uint4*>(own + peers.data(parity, rank)) + start + at));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] = rank == 0 ? term[i] : sums[i] + term[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) mine[v].set(i, sums[i]);
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[v].set(i, x[v][i] + mine[v][i]);
        squares = fmaf(x[v][i], x[v][i], squares);
      }
      put(call.total, start + at, x[v]);
    } else {
      put(call.y, start + at, mine[v]);
    }
  }
  if constexpr (kNorm) {
    const int lane = threadIdx.x % 32;
    squares = sum_of_lanes(squares, 32);
    if (lane == 0) of_warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = sum_of_lanes(lane < blockDim.x / 32 ? of_warps[lane] : 0, 32);
    const float factor = rsqrtf(squares / static_cast<float>(call.size) + call.eps);
#pragma unroll
    for (int v = 0; v < kEights; ++v) {
      const int at = v * blockDim.x + threadIdx.x;
      if (at >= count) break;
      const Eight<T> weight = eight<T>(call.weight, at);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v].set(i, x[v][i] * factor * weight[i]);
      put(call.y, start + at, x[v]);
    }
  }

  __syncthreads();  // the block has received its part
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&header->ended, 1) + 1 == gridDim.x) {  // every block knows the number of this sum
      header->ended = 0;
      header->number = number;
    }
  }
}

}  // namespace qload::cuda
