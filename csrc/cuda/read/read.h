// A kernel that only reads memory: the lower bound of the time of every kernel over as many bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

/// `bytes`: a multiple of 16. `sink`: a word that is practically never written; it keeps the compiler from removing loads.
cudaError_t read(const void* from, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace qload::cuda
