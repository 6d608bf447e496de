// Inputs of each token in another order; see gather.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct GatherInputs {
  const void* x;        // 16-bit numbers (M, inputs)
  const int32_t* perm;  // (rows,) input of each row; `inputs` or more: a zero
  void* y;              // as x (M, rows), aligned to 16 bytes
  int M, inputs, rows;  // rows a multiple of 8
  bool staged;          // copy each token to shared memory first
  bool early;           // may start before the previous kernel ends
};

/// cudaErrorNotSupported: no kernel for these arguments.
cudaError_t gather_inputs(const GatherInputs& call, cudaStream_t stream);

}  // namespace qload::cuda
