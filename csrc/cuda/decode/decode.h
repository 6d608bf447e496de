// x times a 4-bit or 8-bit weight in Marlin's order or our own, up to 16 or 48 tokens; see decode.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

// Tokens; in our own order; of 4 bits there, where zero points are all the same and groups have 128 rows or all.
constexpr int kMostDecoded = 16, kMostOfOwn = 24, kMostSymmetric = 48;

struct Decode {
  const void* x;         // fp16 or bf16 (M, inputs)
  const void* weights;   // int32 (K / 16, N * bits / 2) in Marlin's order, (N / 64, K * bits * 2) in our own
  const void* scales;    // as x (G, N), Marlin's order; of numbers fp32, (N,) or one of each tile: (K / 128, N / 64);
                         // of scaled ones (K / 128, N * 128 / group) of layouts/strips.py
  const void* zeros;     // int32 (G, N * bits / 32), Marlin's order; null: all are 2**(bits - 1); of scaled numbers fp32 (N,), scales of columns;
                         // with `offset_zero` offsets as x (G, N), in the order of scales of several groups
  const int32_t* g_idx;  // (K,) the group of each row; null: row i is of group i / group
  const int32_t* perm;   // (K,) the input of each row; null: in order
  const void* bias;      // as x (outputs,), plain; null
  const float* token_scales;  // (M,), factors of the tokens' sums; null: 1
  void* y;               // as x (M, outputs)
  int M, K, N;           // K, N padded to 64
  int inputs, outputs;   // at most K, N
  Code code;             // numbers are in our own order
  int group;             // 16 to 128 of scaled numbers; 32, 64, 128; K or more: one scale a column
  int offset_zero = -1;  // the zero point of all codes of integers with offsets, in our own order; -1: no offsets
  bool wide = false;     // scales and offsets are fp32, both in the order of several groups
  bool own, bfloat16;
  int columns, split;    // tiles of 64 columns of a block, blocks that share columns; 0: chosen here
  bool early;            // may start before the kernel ahead ends
};

/// cudaErrorNotSupported: no kernel for this.
cudaError_t decode(const Decode& call, cudaStream_t stream);

}  // namespace qload::cuda
