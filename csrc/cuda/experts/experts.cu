// Launches of experts.cuh, sort.cuh and rows.cuh.
#include "experts.h"

#include "../device/launch.h"
#include "experts.cuh"
#include "rows.cuh"
#include "sort.cuh"

namespace qload::cuda {
namespace {

constexpr int kRegisters = 65536;  // of a multiprocessor

template <class T>
ExpertsKernel kernel_of(const Experts& call, bool small) {
  if (is_scaled(call.code)) return scaled_experts_of<T>(call);
  return is_number(call.code) ? number_experts_of<T>(call) : integer_experts_of<T>(call, small);
}

/// Whether kernels exist for the scales of a call.
bool has_scales(const Experts& call) {
  if (is_scaled(call.code)) return call.zeros && has_scales_of(call.code, call.group);
  return !is_number(call.code) || (!call.zeros && (call.group == kChunk || call.group >= call.K));
}

bool fits(const Experts& call) {
  const bool lengths = call.tokens == 8 || call.tokens == 16;
  const int warps = call.columns * call.row_warps;
  if (!has_scales(call) || !lengths || call.K % kChunk || call.N % kTileN || warps < 1) return false;
  if (call.inputs > call.K || call.inputs % 8 || reinterpret_cast<uintptr_t>(call.x) % 16) return false;
  if (32 * warps * most_registers(call.tokens / 8) > kRegisters) return false;
  return !call.gated || (call.columns == 2 && call.outputs == call.N && call.N % (2 * kTileN) == 0);
}

int pieces(int columns, int each) { return (columns + each - 1) / each; }

}  // namespace

cudaError_t sort_by_expert(const Sort& call, cudaStream_t stream) {
  if (call.choice.pairs == 0 || call.choice.experts == 0) return cudaSuccess;
  if (call.choice.experts > kMostExperts || call.tokens < 4 || call.tokens % 4) return cudaErrorNotSupported;
  return launch(sort_kernel, dim3(call.choice.experts), kSortThreads, call.choice.experts * 4, 1,
                this_device().major >= 9, stream, call);
}

cudaError_t multiply_experts(const Experts& call, cudaStream_t stream) {
  if (call.most_items == 0 || call.outputs == 0) return cudaSuccess;
  if (this_device().major != 9 || !fits(call)) return cudaErrorNotSupported;
  Chunks work{};
  work.columns = call.columns, work.row_warps = call.row_warps, work.split = 1;
  work.lay_groups(call.K, call.group);
  work.lay_steps();
  const bool small = work.has_small_groups();
  const ExpertsKernel kernel = call.bfloat16 ? kernel_of<__nv_bfloat16>(call, small) : kernel_of<__half>(call, small);
  if (!kernel) return cudaErrorNotSupported;
  const int warps = call.columns * call.row_warps, shared = warps * warp_bytes(call.tokens, Order::kOwn, Groups::kChunks);
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
    return error;
  const int tiles = call.N / kTileN, groups = call.gated ? tiles / 2 : pieces(tiles, call.columns);
  const int together = std::max(1, kRegisters / (32 * warps * most_registers(call.tokens / 8)));  // of a multiprocessor
  const int64_t units = int64_t{call.most_items} * groups, places = int64_t{this_device().multiprocessors} * together;
  const dim3 grid(static_cast<unsigned>(std::min(units, places)));
  return launch(kernel, grid, 32 * warps, shared, 1, call.early, stream, call, work);
}

cudaError_t gather_rows(const Gather& call, cudaStream_t stream) {
  if (call.rows == 0 || call.K == 0) return cudaSuccess;
  if (call.K % 8) return cudaErrorNotSupported;
  const dim3 grid(call.rows, pieces(call.K, kRowThreads * 8));
  const auto kernel = call.bfloat16 ? gather_kernel<__nv_bfloat16> : gather_kernel<__half>;
  return launch(kernel, grid, kRowThreads, 0, 1, call.early, stream, call);
}

cudaError_t spread_values(const Spread& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  return launch(spread_kernel, dim3(pieces(call.rows, kRowThreads), 2), kRowThreads, 0, 1, call.early, stream, call);
}

cudaError_t gate_rows(const Gated& call, cudaStream_t stream) {
  if (call.rows == 0 || call.columns == 0) return cudaSuccess;
  const auto kernel = call.bfloat16 ? call.in_fp32 ? gated_kernel<float, __nv_bfloat16>
                                                   : gated_kernel<__nv_bfloat16, __nv_bfloat16>
                      : call.in_fp32 ? gated_kernel<float, __half>
                                     : gated_kernel<__half, __half>;
  const dim3 grid(call.rows, pieces(call.pitch, kRowThreads * 4));
  return launch(kernel, grid, kRowThreads, 0, 1, call.early, stream, call);
}

cudaError_t combine_choices(const Combine& call, cudaStream_t stream) {
  if (call.tokens == 0 || call.columns == 0) return cudaSuccess;
  const auto kernel = call.bfloat16 ? call.in_fp32 ? combine_kernel<float, __nv_bfloat16>
                                                   : combine_kernel<__nv_bfloat16, __nv_bfloat16>
                      : call.in_fp32 ? combine_kernel<float, __half>
                                     : combine_kernel<__half, __half>;
  const dim3 grid(call.tokens, pieces(call.columns, kRowThreads * 4));
  return launch(kernel, grid, kRowThreads, 0, 1, call.early, stream, call);
}

}  // namespace qload::cuda
