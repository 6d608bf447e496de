// x times a weight in ExLlama's order; see exllama.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

struct Exllama {
  const void* x;         // fp16 or bf16 (M, K)
  const void* weights;   // int32 (K * bits / 32, N), ExLlama's order
  const void* zeros;     // int32 (G, N * bits / 32), GPTQ's order
  const void* scales;    // as x (G, N)
  const int32_t* g_idx;  // (K,) group of each row, in any order
  const int32_t* perm;   // (K,) input of each row; null: in order
  const void* bias;      // as x (N,); null
  void* y;               // as x (M, N)
  int M, K, N, groups;   // N a multiple of 4, for words of zero points; groups: G
  int bits;              // 2, 3, 4, 8
  int group;             // expected rows of a group, only for the first lookup
  uint32_t zero_word, zero_mask;  // a zero point is (field of (word + zero_word)) + zero_add, masked
  int zero_add;
  bool bfloat16;
  int columns, split;    // tiles of 64 columns per block, blocks that share columns; 0: chosen by the launch
  bool early;            // may start before the previous kernel ends
};

/// cudaErrorNotSupported: no kernel for these arguments.
cudaError_t exllama(const Exllama& call, cudaStream_t stream);

}  // namespace qload::cuda
