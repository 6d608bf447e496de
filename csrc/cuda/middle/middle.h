// x times a weight of 4 or 8 bits in Marlin's order, from 17 tokens on; see middle.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct Middle {
  const void* x;        // fp16 or bf16 (M, inputs), inputs a multiple of 8
  const void* weights;  // int32 (K / 16, N bits / 2), Marlin's order
  const void* scales;   // as x (G, N), Marlin's order
  const void* zeros;    // int32 (G, N bits / 32), Marlin's order; null: all are 2**(bits - 1)
  const void* bias;     // as x (outputs,), plain; null
  void* y;              // as x (M, outputs)
  int M, K, N;          // K, N padded to 64
  int inputs, outputs;  // at most K, N
  int bits, group;      // 32, 64, 128; K or more: one scale a column
  bool bfloat16;
  int columns;          // of a block: 512 of 33 to 64 tokens, or else 256
  int together;         // blocks of a multiprocessor: two up to 32 tokens, or else one
  int split;            // blocks that share columns; up to 8
  bool early;           // may start before the kernel ahead ends
};

/// cudaErrorNotSupported: no kernel for this. Pointers of x, weights, scales and zeros are multiples of 16.
cudaError_t middle(const Middle& call, cudaStream_t stream);

}  // namespace qload::cuda
