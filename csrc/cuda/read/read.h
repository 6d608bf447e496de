// Read memory and nothing else: the time no kernel over as many bytes can beat.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qload::cuda {

/// `bytes` in multiples of 16. `sink`: a word that is never written in practice, and keeps the reads alive.
cudaError_t read(const void* from, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace qload::cuda
