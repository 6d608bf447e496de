// Move elements between two packed orders; see move.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "plan.h"

namespace qload::cuda {

/// `rows` may be null; else digits with `row` != 0 give the row number, and rows[row] its start.
cudaError_t move(int bits, const std::vector<Digit>& digits, const void* from, const int64_t* rows, void* to,
                 cudaStream_t stream);

}  // namespace qload::cuda
