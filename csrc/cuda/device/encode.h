// The driver's function that encodes a matrix for bulk copies.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace qload::cuda {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// Null if the driver lacks it. It is looked up by name, as the module is not linked with the driver.
inline Encode encode() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const auto error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

}  // namespace qload::cuda
