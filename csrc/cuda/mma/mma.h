// x times a weight in strips by mma.sync, best from 17 tokens on, from Ampere on; see mma.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

struct Mma {
  const void* x;              // fp16 or bf16 (M, inputs), inputs a multiple of 8
  const void* weights;        // int32 (N / 64, K * bits * 2), strips
  const void* scales;         // as in decode.h
  const void* zeros;          // as in decode.h, or offsets
  const void* bias;           // as x (outputs,); null
  const float* token_scales;  // (M,), factors of the tokens' sums; null: 1
  void* y;                    // as x (M, outputs)
  void* parts;                // fp32 (slices, M, N), scratch; null with one slice
  int M, K, N;                // K padded to 128, N to 64
  int inputs, outputs;        // at most K, N
  Code code;
  int group;                  // as in decode.h
  int offset_zero;            // as in decode.h
  bool wide;                  // as in decode.h
  bool bfloat16;
  int tokens;                 // of a warp: 32, 48 or 64
  int columns, row_warps;     // tiles of 64 columns per block, warps that share the rows of each
  int slices;                 // of K; a second kernel adds their sums
  bool early;                 // may start before the previous kernel ends
};

/// cudaErrorNotSupported: no kernel for these arguments. Pointers of x, weights, scales and zeros are multiples of 16.
cudaError_t mma(const Mma& call, cudaStream_t stream);

}  // namespace qload::cuda
