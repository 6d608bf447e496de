// Blocks of a cluster on Hopper: waiting for each other, and reading and writing each other's shared memory.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace qload::cuda {

/// Where `own` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t address_in(const void* own, int rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
#endif
  return there;
}

/// A float to where `own` lies in the shared memory of another block of the cluster, counted by its barrier.
__device__ __forceinline__ void send(float value, const float* own, const uint64_t* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  const uint32_t there = address_in(own, rank), its_barrier = address_in(barrier, rank);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
               "r"(__float_as_uint(value)), "r"(its_barrier)
               : "memory");
#endif
}

/// As `send`, of four, to an address and a barrier as `address_in` has them.
__device__ __forceinline__ void send(float4 value, uint32_t there, uint32_t its_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
               "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
               "r"(__float_as_uint(value.w)), "r"(its_barrier)
               : "memory");
#endif
}

/// Four floats to where `own` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ void store_there(float4 value, const float4* own, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_in(own, rank)), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#endif
}

/// Four floats where `own` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ float4 load_from(const float4* own, int rank) {
  float4 value{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address_in(own, rank))
               : "memory");
#endif
  return value;
}

/// At a barrier in another block of the cluster, as `address_in` has it. Nothing that was written is told of.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

/// This block has come so far; the others can go on once all have.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

/// Until all blocks of the cluster have come so far, and what they stored can be read.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// The same where no thread of a warp comes alone.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace qload::cuda
