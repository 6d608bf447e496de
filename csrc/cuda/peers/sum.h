// Sums over the ranks of a machine; see sum.cuh.
#pragma once

#include "memory.h"

namespace qload::cuda {

struct SumRanks {
  PeerView peers;
  const void* values;  // fp16 or bf16 (rows, size): the summand of this rank
  const void* x;       // as values; null: no norm
  const void* weight;  // as values (size,); null: no norm
  void* total;         // as values: x + the sum; null without a norm
  void* y;             // as values: the norm of `total`, or else the sum
  int64_t rows, size;  // size a multiple of 8, with a norm at most 32768
  float eps;
  bool bfloat16;
};

/// cudaErrorNotSupported: no kernel for these arguments. Every rank makes the same calls in the same order.
cudaError_t sum_ranks(const SumRanks& call, cudaStream_t stream);

}  // namespace qload::cuda
