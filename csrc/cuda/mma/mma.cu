// Launches of mma.cuh, and the layout of its ring in shared memory.
#include "mma.h"

#include <algorithm>

#include "../device/launch.h"
#include "../device/slices.cuh"
#include "mma.cuh"

namespace qload::cuda {
namespace {

using namespace mma_room;

/// Whether kernels exist for the scales of a call.
bool fits(const Mma& call) {
  if (is_scaled(call.code)) return call.zeros && has_scales_of(call.code, call.group);
  const bool whole = call.group == kChunk || call.group >= call.K;
  if (call.offset_zero >= 0 && (!call.zeros || is_number(call.code))) return false;
  if (call.wide && (call.offset_zero < 0 || call.group >= call.K)) return false;
  return is_number(call.code) ? whole && !call.zeros : whole || call.group == 32 || call.group == 64;
}

bool has_warps(const Mma& call) {
  return call.columns > 0 && call.row_warps > 0 && kWarps % (call.columns * call.row_warps) == 0;
}

/// False: the ring lacks room for two stages.
bool lay_out(const Mma& call, int shared, Work& work) {
  const int steps = steps_of_stage(bits_of(call.code));
  work.columns = call.columns, work.split = 1, work.row_warps = call.row_warps;
  work.chunks = call.K / kChunk, work.token_warps = kWarps / (call.columns * call.row_warps);
  if (is_number(call.code)) {
    work.begins = is_scaled(call.code) || call.group < call.K;
    work.scale_bytes = is_scaled(call.code) ? kTileN * column_scale_bytes(call.code, call.group) : 16;
  } else if (call.group < call.K) {
    work.begins = call.group == 32 ? 15 : call.group == 64 ? 5 : 1;
    work.group_shift = call.group == 32 ? 5 : call.group == 64 ? 6 : 7;
    work.group_bytes = call.wide               ? 2 * kWideBytes
                       : call.offset_zero >= 0 ? 2 * kGroupBytes
                                               : kGroupBytes + (call.zeros ? kTileN : 0);
    work.scale_bytes = work.group_bytes * (call.group == 32 ? steps : 1);
  }
  const int x_bytes = call.tokens * work.token_warps * steps * kStepTokenBytes;
  work.stage_bytes = call.row_warps * (x_bytes + call.columns * (kTileStageBytes + work.scale_bytes));
  work.stages = std::min(kMostStages, shared / work.stage_bytes);
  return work.stages >= 2;
}

template <class T>
cudaError_t added(const Mma& call, bool early, cudaStream_t stream) {
  const int64_t blocks = (int64_t{call.M} * (call.N / 4) + kAddThreads - 1) / kAddThreads;
  return launch(add_slices<T, Mma>, dim3(static_cast<unsigned>(blocks)), kAddThreads, 0, 1, early, stream, call);
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
  const MmaKernel kernel = call.bfloat16 ? mma_of<__nv_bfloat16>(call) : mma_of<__half>(call);
  if (!kernel) return cudaErrorNotSupported;
  const int shared = std::max(work.stages * work.stage_bytes, kWarps * laid_bytes(call.tokens / 8));
  if (const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared)) return error;
  const int tokens = call.tokens * work.token_warps, columns = call.columns * kTileN;
  const dim3 grid((call.M + tokens - 1) / tokens, (call.N + columns - 1) / columns, call.slices);
  const bool early = call.early && device.major >= 9;
  const cudaError_t started = launch(kernel, grid, 32 * kWarps, shared, 1, early, stream, call, work);
  if (started != cudaSuccess || !sliced) return started;
  return call.bfloat16 ? added<__nv_bfloat16>(call, early, stream) : added<__half>(call, early, stream);
}

}  // namespace qload::cuda
