// Few tokens times rows of float32; see floats.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct FloatRows {
  const float* x;     // (M, K), contiguous
  const float* w;     // (N, K), contiguous
  const float* bias;  // (N,) or null
  float* y;           // (M, N), rows `pitch` elements apart
  int64_t M, N, K, pitch;
};

/// y = x w^T + bias. cudaErrorNotSupported: more than 16 tokens, K not a multiple of 4 or above 2**26, or rows not
/// aligned to 16 bytes.
cudaError_t multiply_floats(const FloatRows& work, cudaStream_t stream);

}  // namespace qload::cuda
