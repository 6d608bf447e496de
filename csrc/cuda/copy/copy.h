// Runs of bytes from memory of the host to memory of a device.
//
//   in      pinned memory of the host, any alignment
//   out     memory of the stream's device
//   limit   the bus; one call asks for all runs, so that a thread of Python gives its lock away once
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

/// Asks for the copies, in order, and waits for none of them.
inline cudaError_t copy(const std::vector<Run>& runs, cudaStream_t stream) {
  for (const Run& run : runs) {
    if (!run.bytes) continue;
    const cudaError_t error = cudaMemcpyAsync(run.to, run.from, run.bytes, cudaMemcpyHostToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace qload::cuda
