// Codes of any width along columns of words; see streams.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "dequantize.h"

namespace qload::cuda {

struct StreamsCall {
  const void* words;
  int64_t R;
  int bits, run;
  std::array<uintptr_t, 3> tables;  // starts, widths, groups: all three, or groups alone
  uintptr_t order;
  uintptr_t scales;
  int scale_type;
  int64_t scale_n, scale_k;
  uintptr_t squares, units;
  uintptr_t zeros;
  int64_t zeros_pitch;
  int add, mask;
};

/// cudaErrorNotSupported: sizes or addresses do not fit, or shared memory lacks room for all inputs of a few outputs.
cudaError_t dequantize_streams(const StreamsCall& call, const Matrix& matrix, cudaStream_t stream);

}  // namespace qload::cuda
