// Packed codes, or single ones, to rows of floats; see tiles.cuh, table.cuh, general.cuh, rows.cuh, single.cuh.
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
  int64_t pitch;  // bytes from row to row
  const void* places;  // of codes that are kept, or null
  int64_t places_pitch;
};

/// `digits` move codes to rows that are 2**row_bits codes apart. cudaErrorNotSupported: no plan moves them.
cudaError_t dequantize(int bits, const std::vector<Digit>& digits, int row_bits, const Meaning& meaning,
                       const void* codes, const Matrix& matrix, cudaStream_t stream);

/// Codes of a table of 16 values, two a byte, flat; scales fp32, one a block of 2**block_bits codes.
cudaError_t dequantize_table(const void* codes, const float* table, const float* scales, int block_bits,
                             const Matrix& matrix, cudaStream_t stream);

/// `bytes` of a code, negative for signed ones.
cudaError_t dequantize_single(int bytes, int64_t stride_n, int64_t stride_k, const Meaning& meaning,
                              const void* codes, const Matrix& matrix, cudaStream_t stream);

/// Codes in bytes, row by row; `source`: how, see rows.cuh. cudaErrorNotSupported: they lie between two loads.
cudaError_t dequantize_rows(int source, const StoredRows& stored, const Meaning& meaning, const Matrix& matrix,
                            cudaStream_t stream);

}  // namespace qload::cuda
