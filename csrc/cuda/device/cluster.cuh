// Clusters of blocks on Hopper: synchronization, and access to the shared memory of another block.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace qload::cuda {

/// Address of `own` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* own, int rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
#endif
  return there;
}

/// Store a float at the address of `own` in another block. The barrier of that block counts the bytes.
__device__ __forceinline__ void send(float value, const float* own, const uint64_t* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  const uint32_t there = remote_address(own, rank), peer_barrier = remote_address(barrier, rank);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
               "r"(__float_as_uint(value)), "r"(peer_barrier)
               : "memory");
#endif
}

/// The same for four floats; address and barrier are results of `remote_address`.
__device__ __forceinline__ void send(float4 value, uint32_t there, uint32_t peer_barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
               "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
               "r"(__float_as_uint(value.w)), "r"(peer_barrier)
               : "memory");
#endif
}

/// Store a float at the address of `own` in another block.
__device__ __forceinline__ void store_remote(float value, const float* own, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote_address(own, rank)), "f"(value) : "memory");
#endif
}

/// Store four floats at the address of `own` in another block.
__device__ __forceinline__ void store_remote(float4 value, const float4* own, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote_address(own, rank)), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#endif
}

/// Load four floats from the address of `own` in another block.
__device__ __forceinline__ float4 load_remote(const float4* own, int rank) {
  float4 value{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote_address(own, rank))
               : "memory");
#endif
  return value;
}

/// Arrive at a barrier of another block, a result of `remote_address`. Earlier writes are not published.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

/// Arrive at the barrier of the cluster, without a wait.
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

/// Wait for all blocks of the cluster. Their earlier writes are visible afterwards.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// The same; all threads of a warp call it together.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace qload::cuda
