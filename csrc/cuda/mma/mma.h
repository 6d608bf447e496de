// x in fp16 times 4-bit integers in strips by mma.sync, from 17 tokens on, on every chip since Ampere; see mma.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct Mma {
  const void* x;              // fp16 (M, inputs), inputs a multiple of 8
  const void* weights;        // int32 (N / 64, K * 8), strips
  const void* scales;         // as in decode.h
  const void* zeros;          // as in decode.h
  const void* bias;           // as x (outputs,); null
  const float* token_scales;  // null, for add_slices
  void* y;                    // as x (M, outputs)
  void* parts;                // fp32 (slices, M, N), written and read; null with one slice
  int M, K, N;                // K padded to 128, N to 64
  int inputs, outputs;        // at most K, N
  int group;                  // 32, 64, 128; K or more: one scale a column
  int tokens;                 // of a warp: 32, 48 or 64
  int columns, row_warps;     // tiles of 64 columns of a block, warps that share the rows of each
  int slices;                 // of K; a second kernel adds them up
};

/// cudaErrorNotSupported: no kernel for this. Pointers of x, weights, scales and zeros are multiples of 16.
cudaError_t mma(const Mma& call, cudaStream_t stream);

}  // namespace qload::cuda
