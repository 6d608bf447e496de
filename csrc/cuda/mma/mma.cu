// Launches of mma.cuh: how a ring is laid out, and the list of kernels.
#include "mma.h"

#include <algorithm>

#include "../device/launch.h"
#include "../device/slices.cuh"
#include "mma.cuh"

namespace qload::cuda {
namespace {

using namespace mma_room;

using Kernel = void (*)(const Mma, const Work);

Kernel kernel_of(int tokens) {
  switch (tokens) {
    case 32: return mma_kernel<__half, 4>;
    case 48: return mma_kernel<__half, 6>;
    case 64: return mma_kernel<__half, 8>;
  }
  return nullptr;
}

bool fits(const Mma& call) {
  return call.group == 32 || call.group == 64 || call.group == kChunk || call.group >= call.K;
}

bool has_warps(const Mma& call) {
  return call.columns > 0 && call.row_warps > 0 && kWarps % (call.columns * call.row_warps) == 0;
}

/// False: the ring has no room for two stages.
bool lay_out(const Mma& call, int shared, Work& work) {
  work.columns = call.columns, work.split = 1, work.row_warps = call.row_warps;
  work.chunks = call.K / kChunk, work.token_warps = kWarps / (call.columns * call.row_warps);
  if (call.group < call.K) {
    work.begins = call.group == 32 ? 15 : call.group == 64 ? 5 : 1;
    work.group_shift = call.group == 32 ? 5 : call.group == 64 ? 6 : 7;
    work.group_bytes = kGroupBytes + (call.zeros ? kTileN : 0);
    work.scale_bytes = work.group_bytes * (call.group == 32 ? kStageSteps : 1);
  }
  const int x_bytes = call.tokens * work.token_warps * kStageSteps * kStepTokenBytes;
  work.stage_bytes = call.row_warps * (x_bytes + call.columns * (kTileStageBytes + work.scale_bytes));
  work.stages = std::min(kMostStages, shared / work.stage_bytes);
  return work.stages >= 2;
}

cudaError_t added(const Mma& call, cudaStream_t stream) {
  const int64_t blocks = (int64_t{call.M} * (call.N / 4) + kAddThreads - 1) / kAddThreads;
  return launch(add_slices<__half, Mma>, dim3(static_cast<unsigned>(blocks)), kAddThreads, 0, 1, false, stream, call);
}

}  // namespace

cudaError_t mma(const Mma& call, cudaStream_t stream) {
  if (call.M == 0 || call.outputs == 0) return cudaSuccess;
  const bool sliced = call.slices > 1;
  if (call.K % kChunk || call.N % kTileN || call.inputs % 8 || call.slices < 1 || call.slices > call.K / kChunk ||
      (sliced && !call.parts) || !fits(call) || !has_warps(call))
    return cudaErrorNotSupported;
  const Device device = this_device();
  Work work{};
  if (!lay_out(call, device.shared, work)) return cudaErrorNotSupported;
  const Kernel kernel = kernel_of(call.tokens);
  if (!kernel) return cudaErrorNotSupported;
  const int shared = std::max(work.stages * work.stage_bytes, kWarps * laid_bytes(call.tokens / 8));
  if (const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared)) return error;
  const int tokens = call.tokens * work.token_warps, columns = call.columns * kTileN;
  const dim3 grid((call.M + tokens - 1) / tokens, (call.N + columns - 1) / columns, call.slices);
  const cudaError_t started = launch(kernel, grid, 32 * kWarps, shared, 1, false, stream, call, work);
  if (started != cudaSuccess || !sliced) return started;
  return added(call, stream);
}

}  // namespace qload::cuda
