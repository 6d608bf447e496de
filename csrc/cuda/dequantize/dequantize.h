// Packed or single codes to rows of floats; see tiles.cuh, table.cuh, general.cuh, rows.cuh, single.cuh.
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

struct StoredRows {
  const void* codes;
  int64_t pitch;  // bytes between rows
  const void* places;  // positions of nonzero codes in 2:4 weights, or null
  int64_t places_pitch;
};

/// `digits` map codes to rows that are 2**row_bits codes apart. cudaErrorNotSupported: no plan exists for them.
cudaError_t dequantize(int bits, const std::vector<Digit>& digits, int row_bits, const Meaning& meaning,
                       const void* codes, const Matrix& matrix, cudaStream_t stream);

/// Codes of a table of 16 values, two per byte, flat; fp32 scales, one for each block of 2**block_bits codes.
cudaError_t dequantize_table(const void* codes, const float* table, const float* scales, int block_bits,
                             const Matrix& matrix, cudaStream_t stream);

/// `bytes`: size of a code, negative for signed codes.
cudaError_t dequantize_single(int bytes, int64_t stride_n, int64_t stride_k, const Meaning& meaning,
                              const void* codes, const Matrix& matrix, cudaStream_t stream);

/// Codes in bytes, row by row; `source`: a `Source` of rows.cuh. cudaErrorNotSupported: codes cross the border of a load.
cudaError_t dequantize_rows(int source, const StoredRows& stored, const Meaning& meaning, const Matrix& matrix,
                            cudaStream_t stream);

}  // namespace qload::cuda
