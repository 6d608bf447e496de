// Barriers in shared memory on Hopper, that count who has arrived and what bytes have come.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace qload::cuda {

/// A barrier in shared memory whose phase ends once so many have arrived and all announced bytes have come.
__device__ __forceinline__ void start_barrier(uint64_t* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

/// Barriers that were started can be seen by copies and by other blocks of the cluster.
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

/// Arrives; the phase ends once as many bytes have come.
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

/// Until the phase of this parity has ended; for what comes from this block and its copies alone.
template <class Barrier>
__device__ __forceinline__ void wait_for(Barrier barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  QLOAD_WAIT("");
#endif
}

/// The same for what other blocks of the cluster send.
__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  QLOAD_WAIT(".acquire.cluster");
#endif
}

#undef QLOAD_WAIT

}  // namespace qload::cuda
