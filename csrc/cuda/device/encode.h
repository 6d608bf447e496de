// The driver's function that describes matrices to bulk copies.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace qload::cuda {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// Null where the driver has none. It is asked for by name, since the module is not linked with the driver.
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
