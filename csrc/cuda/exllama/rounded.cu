// Launches of rounded.cuh.
#include "rounded.h"

#include "../device/launch.h"
#include "rounded.cuh"

namespace qload::cuda {

cudaError_t rounded_three(const RoundedThree& call, cudaStream_t stream) {
  using namespace exl;
  if (call.K == 0 || call.columns == 0) return cudaSuccess;
  if (call.K % 32 || call.N % 32 || call.first % 4 || call.columns % 4) return cudaErrorNotSupported;
  const auto lies = [](const void* at, int bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; };
  if (!lies(call.weights, 16) || !lies(call.scales, 8) || !lies(call.w, 8)) return cudaErrorNotSupported;
  const dim3 grid((call.columns / 4 + kRoundedThreads - 1) / kRoundedThreads, call.K / 32);
  auto* kernel = call.bfloat16 ? rounded_three_kernel<__nv_bfloat16> : rounded_three_kernel<__half>;
  return launch(kernel, grid, kRoundedThreads, 0, 1, false, stream, call);
}

}  // namespace qload::cuda
