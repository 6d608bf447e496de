// A ring of buffers in shared memory on Hopper: bulk copies fill it, barriers count bytes and finished readers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "barrier.cuh"
#include "cluster.cuh"
#include "ptx.cuh"

namespace qload::cuda {

/// Make this thread's writes to shared memory visible to matrix products and bulk copies.
__device__ __forceinline__ void publish_writes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Cache policy of the L2 for a copy: evict first, or normal.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

/// Copy a box of a matrix with its first element at (row, column); elements beyond the edges are zero. The barrier
/// counts the bytes. `to`, `barrier`: pointers or results of `shared_address`.
template <class To, class Barrier>
__device__ __forceinline__ void copy_box(To to, const CUtensorMap& matrix, int column, int row, Barrier barrier,
                                         uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(&matrix), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

/// The same to several blocks of the cluster, one bit of `ranks` each; their barriers count the bytes.
template <class To, class Barrier>
__device__ __forceinline__ void copy_box_to(uint16_t ranks, To to, const CUtensorMap& matrix, int column, int row,
                                            Barrier barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared_address(to)),
      "l"(&matrix), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(ranks), "l"(policy)
      : "memory");
#endif
}

/// Prefetch the descriptor of a matrix before its first copy.
__device__ __forceinline__ void prefetch_description(const CUtensorMap& matrix) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&matrix) : "memory");
#endif
}

/// `copy_box` for a matrix of three dimensions.
template <class To, class Barrier>
__device__ __forceinline__ void copy_box(To to, const CUtensorMap& matrix, int column, int row, int plane,
                                         Barrier barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(&matrix), "r"(column), "r"(row), "r"(plane), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

/// Copy `bytes` bytes, a multiple of 16, between addresses that are multiples of 16. The barrier counts them.
template <class To, class Barrier>
__device__ __forceinline__ void copy_bytes(To to, const void* from, int bytes, Barrier barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

/// Two threads of the warps after the first `others` threads fill rings: one with weights, one with inputs.
template <int others, class Filling>
__device__ __forceinline__ void fill(Filling& filling) {
  if (threadIdx.x / 32 == others / 32) {
    if (elect_one()) filling.weights();
  } else if (threadIdx.x / 32 == others / 32 + 1) {
    if (elect_one()) filling.inputs();
  }
}

/// Wait for `threads` threads of the block; each `group` has its own barrier.
template <int threads>
__device__ __forceinline__ void barrier_of(int group = 0) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(threads) : "memory");
}

}  // namespace qload::cuda
