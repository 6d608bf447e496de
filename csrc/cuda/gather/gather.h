// Inputs of each token in another order; see gather.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct GatherInputs {
  const void* x;        // 16-bit numbers (M, inputs)
  const int32_t* perm;  // (rows,) the input of each row; `inputs` or more: there is none
  void* y;              // as x (M, rows), at a multiple of 16 bytes
  int M, inputs, rows;  // rows a multiple of 8
  bool staged;          // each token by way of shared memory
  bool early;           // may start before the kernel ahead ends
};

/// cudaErrorNotSupported: no kernel for this.
cudaError_t gather_inputs(const GatherInputs& call, cudaStream_t stream);

}  // namespace qload::cuda
