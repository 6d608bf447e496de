// A weight of 3 bits in ExLlama's order as numbers; see rounded.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct RoundedThree {
  const void* weights;   // int32 (K * 3 / 32, N), ExLlama's order, aligned to 16 bytes
  const void* zeros;     // int32 (G, N * 3 / 32), GPTQ's order
  const void* scales;    // fp16 or bf16 (G, N), aligned to 8 bytes
  const int32_t* g_idx;  // (K,) group of each row, in any order
  void* w;               // as scales (K, columns), aligned to 8 bytes
  int K, N;              // multiples of 32
  int first, columns;    // range of columns: multiples of 4
  uint32_t zero_mask;    // a zero point is field + zero_add, masked
  int zero_add;
  bool bfloat16;
};

/// cudaErrorNotSupported: no kernel for these arguments.
cudaError_t rounded_three(const RoundedThree& call, cudaStream_t stream);

}  // namespace qload::cuda
