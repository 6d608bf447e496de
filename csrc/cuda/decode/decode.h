// x times a 4-bit or 8-bit weight in Marlin's order or in strips, up to 16 or 48 tokens; see decode.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

// Maximal tokens: in Marlin's order; in strips; of 4 bits in strips with equal zero points and groups of 128 or all rows.
constexpr int kMostDecoded = 16, kMostOfOwn = 24, kMostSymmetric = 48;

struct Decode {
  const void* x;         // fp16 or bf16 (M, inputs)
  const void* weights;   // int32 (K / 16, N * bits / 2) in Marlin's order, (N / 64, K * bits * 2) in strips
  const void* scales;    // as x (G, N), Marlin's order; of numbers fp32, (N,) or one per tile: (K / 128, N / 64);
                         // of scaled ones (K / 128, N * 128 / group) of layouts/strips.py
  const void* zeros;     // int32 (G, N * bits / 32), Marlin's order; null: all are 2**(bits - 1);
                         // of scaled numbers fp32 (N,), scales of columns;
                         // with `offset_zero` offsets as x (G, N), in the order of scales of several groups
  const int32_t* g_idx;  // (K,) group of each row; null: row i has group i / group
  const int32_t* perm;   // (K,) input of each row; null: in order
  const void* bias;      // as x (outputs,), plain; null
  const float* token_scales;  // (M,), factors of the tokens' sums; null: 1
  void* y;               // as x (M, outputs)
  int M, K, N;           // K, N padded to 64
  int inputs, outputs;   // at most K, N
  Code code;             // numbers are in strips
  int group;             // 16 to 128 for scaled numbers; 32, 64, 128; K or more: one scale per column
  int offset_zero = -1;  // zero point of all codes of integers with offsets, in strips; -1: no offsets
  bool wide = false;     // scales and offsets are fp32, both in the order of several groups
  bool own, bfloat16;
  int columns, split;    // tiles of 64 columns per block, blocks that share columns; 0: chosen by the launch
  bool early;            // may start before the previous kernel ends
};

/// cudaErrorNotSupported: no kernel for these arguments.
cudaError_t decode(const Decode& call, cudaStream_t stream);

}  // namespace qload::cuda
