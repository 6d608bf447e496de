// Barriers in shared memory on Hopper. They count arrivals of threads and bytes of bulk copies.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace qload::cuda {

/// Initialize a barrier. Its phase ends after `arrivals` arrivals and all announced bytes.
__device__ __forceinline__ void start_barrier(uint64_t* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

/// Make initialized barriers visible to bulk copies and to other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

/// Arrive, and announce `bytes` more bytes for this phase.
template <class Barrier>
__device__ __forceinline__ void expect_bytes(Barrier barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

#define QLOAD_WAIT(order)                                                                 \
  asm volatile("{\n.reg .pred done;\n"                                                    \
               "again:\nmbarrier.try_wait.parity" order ".shared::cta.b64 done, [%0], %1;\n" \
               "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(barrier)), "r"(parity)        \
               : "memory")

/// Wait for the end of the phase with this parity. It orders writes of this block and its own copies only.
template <class Barrier>
__device__ __forceinline__ void wait_for(Barrier barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  QLOAD_WAIT("");
#endif
}

/// The same, also for writes of other blocks of the cluster.
__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  QLOAD_WAIT(".acquire.cluster");
#endif
}

#undef QLOAD_WAIT

}  // namespace qload::cuda
