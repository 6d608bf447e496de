// x times a 4-bit weight in Marlin's order; see w4a16.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

constexpr int kMostTokens = 64;

struct W4A16 {
  const void* x;         // fp16 or bf16 (M, inputs)
  const void* weights;   // int32 (K / 16, 2 N), Marlin's order
  const void* scales;    // as x (G, N), Marlin's order
  const void* zeros;     // int32 (G, N / 8), Marlin's order; null: all are 8
  const int32_t* perm;   // (K,) the input of each row; null: in order
  const void* bias;      // as x (outputs,), plain; null
  void* y;               // as x (M, outputs)
  int M, K, N;           // K, N padded to 64
  int inputs, outputs;   // at most K, N
  int group;             // 32, 64, 128; K or more: one scale a column
  bool bfloat16;
  int columns, split;    // of 64 a block, blocks that share columns; 0: chosen here
  bool early;            // may start before the kernel ahead ends
};

/// cudaErrorNotSupported: no kernel for this.
cudaError_t w4a16(const W4A16& call, cudaStream_t stream);

}  // namespace qload::cuda
