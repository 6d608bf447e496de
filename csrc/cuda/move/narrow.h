// Codes in int32 to packed words, and back; see narrow.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

/// `count`: of words. `seen`: OR of all codes.
cudaError_t narrow(int bits, const void* codes, int64_t count, void* words, uint32_t* seen, cudaStream_t stream);
cudaError_t widen(int bits, const void* words, int64_t count, void* codes, cudaStream_t stream);

}  // namespace qload::cuda
