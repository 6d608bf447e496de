// Packed codes, or single ones, to rows of floats; see dequantize.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../move/plan.h"
#include "meaning.h"

namespace qload::cuda {

struct Matrix {
  int64_t N, K;
  void* out;
  Float type;
};

/// `digits` move codes to rows that are 2**row_bits codes apart. cudaErrorNotSupported: no plan moves them.
cudaError_t dequantize(int bits, const std::vector<Digit>& digits, int row_bits, bool high_first,
                       const Meaning& meaning, const void* codes, const Matrix& matrix, cudaStream_t stream);

/// `bytes` of a code, negative for signed ones.
cudaError_t dequantize_single(int bytes, int64_t stride_n, int64_t stride_k, const Meaning& meaning,
                              const void* codes, const Matrix& matrix, cudaStream_t stream);

}  // namespace qload::cuda
