// Move elements between two packed orders; see move.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "plan.h"

namespace qload::cuda {

/// `rows` may be null; else digits whose `row` is not 0 say which row, and rows[row] where it starts.
cudaError_t move(int bits, const std::vector<Digit>& digits, const void* from, const int64_t* rows, void* to,
                 cudaStream_t stream);

}  // namespace qload::cuda
