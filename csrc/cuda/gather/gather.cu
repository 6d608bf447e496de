// Launches of gather.cuh.
#include "gather.h"

#include <algorithm>

#include "../device/launch.h"
#include "gather.cuh"

namespace qload::cuda {

cudaError_t gather_inputs(const GatherInputs& call, cudaStream_t stream) {
  if (call.M == 0 || call.rows == 0) return cudaSuccess;
  if (call.rows % 8 || reinterpret_cast<uintptr_t>(call.y) % 16 || reinterpret_cast<uintptr_t>(call.perm) % 16)
    return cudaErrorNotSupported;
  const Device device = this_device();
  const int64_t bytes = int64_t{2} * call.inputs;
  const bool staged = call.staged && bytes <= device.shared;
  const int shared = staged ? static_cast<int>((bytes + 15) / 16 * 16) : 0;
  auto* kernel = staged ? gather_inputs_kernel<true> : gather_inputs_kernel<false>;
  if (shared > 48 << 10) {
    const cudaError_t raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared);
    if (raised != cudaSuccess) return raised;
  }
  const int most = (call.rows / 8 + kGatherThreads - 1) / kGatherThreads;
  // As many slices as keep all multiprocessors busy: each block copies the whole token.
  const int slices = staged ? std::clamp(2 * device.multiprocessors / call.M, 1, most) : most;
  constexpr int kMostTokens = 65535;  // limit of a grid
  for (int start = 0; start < call.M; start += kMostTokens) {
    GatherInputs here = call;
    here.M = std::min(kMostTokens, call.M - start);
    here.x = static_cast<const uint16_t*>(call.x) + int64_t{start} * call.inputs;
    here.y = static_cast<uint16_t*>(call.y) + int64_t{start} * call.rows;
    const cudaError_t error =
        launch(kernel, dim3(slices, here.M), kGatherThreads, shared, 1, call.early && device.major >= 9, stream, here);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace qload::cuda
