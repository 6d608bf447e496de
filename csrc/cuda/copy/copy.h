// Runs of bytes from host memory to device memory.
//
//   in      pinned host memory, any alignment
//   out     memory of the stream's device
//   limit   the bus; one call starts all copies, so that a Python thread releases the lock once
//
// Equals `Tensor.copy_(host, non_blocking=True)` of each run on the same stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace qload::cuda {

struct Run {
  void* to;
  const void* from;
  size_t bytes;
};

/// Start the copies in order, without a wait.
inline cudaError_t copy(const std::vector<Run>& runs, cudaStream_t stream) {
  for (const Run& run : runs) {
    if (!run.bytes) continue;
    const cudaError_t error = cudaMemcpyAsync(run.to, run.from, run.bytes, cudaMemcpyHostToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace qload::cuda
