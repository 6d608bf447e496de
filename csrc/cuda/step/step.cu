// Launches of norm.cuh, heads.cuh, gated.cuh and route.cuh.
#include "step.h"

#include <algorithm>

#include "../device/launch.h"
#include "gated.cuh"
#include "heads.cuh"
#include "norm.cuh"
#include "route.cuh"

namespace qload::cuda {
namespace {

int pieces(int count, int each) { return (count + each - 1) / each; }

bool aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* each) { return reinterpret_cast<uintptr_t>(each) % 16 == 0; });
}

template <class T>
auto norm_of(int eights) {
  return eights == 1 ? add_norm_kernel<T, 1> : eights == 2 ? add_norm_kernel<T, 2> : add_norm_kernel<T, kMostEights>;
}

}  // namespace

cudaError_t add_norm(const AddNorm& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  const int count = call.size / 8, threads = std::min(1024, pieces(count, 32) * 32);
  const int eights = count ? pieces(count, threads) : 0;
  if (count == 0 || call.size % 8 || eights > kMostEights) return cudaErrorNotSupported;
  if (!aligned({call.x, call.added, call.weight, call.sum, call.y})) return cudaErrorNotSupported;
  const auto kernel = call.bfloat16 ? norm_of<__nv_bfloat16>(eights) : norm_of<__half>(eights);
  return launch(kernel, dim3(call.rows), threads, 0, 1, this_device().major >= 9, stream, call);
}

cudaError_t place_heads(const PlaceHeads& call, cudaStream_t stream) {
  const int heads = call.queries + 2 * call.kv;
  if (call.tokens == 0 || heads == 0) return cudaSuccess;
  if (call.size <= 0 || call.size % 16 || call.size > 512 || !call.q_norm != !call.k_norm) return cudaErrorNotSupported;
  if (!aligned({call.heads, call.cos, call.sin, call.q_norm, call.k_norm, call.q, call.keys, call.values}))
    return cudaErrorNotSupported;
  int lanes = 1;
  while (lanes * 16 < call.size) lanes *= 2;
  const auto kernel = call.bfloat16 ? call.pairs ? place_heads_kernel<__nv_bfloat16, true>
                                                 : place_heads_kernel<__nv_bfloat16, false>
                      : call.pairs ? place_heads_kernel<__half, true>
                                   : place_heads_kernel<__half, false>;
  const dim3 grid(call.tokens, pieces(heads, kHeadThreads / lanes));
  return launch(kernel, grid, kHeadThreads, 0, 1, this_device().major >= 9, stream, call, lanes);
}

cudaError_t gate_pairs(const GateRows& call, cudaStream_t stream) {
  if (call.rows == 0 || call.columns == 0) return cudaSuccess;
  if (call.columns % 8 || !aligned({call.x, call.y})) return cudaErrorNotSupported;
  const auto kernel = call.bfloat16 ? gate_pairs_kernel<__nv_bfloat16> : gate_pairs_kernel<__half>;
  const dim3 grid(call.rows, pieces(call.columns / 8, kGateThreads));
  return launch(kernel, grid, kGateThreads, 0, 1, this_device().major >= 9, stream, call);
}

cudaError_t route_tokens(const RouteTokens& call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  const bool sizes = call.size > 0 && call.size % 8 == 0 && call.experts > 0 && call.experts <= kMostRouted;
  if (!sizes || call.top < 1 || call.top > std::min(call.experts, kMostChosen)) return cudaErrorNotSupported;
  if (!aligned({call.x, call.weight})) return cudaErrorNotSupported;
  const bool hopper = this_device().major >= 9;
  const int split = hopper ? kRoutedTokens : 1, shared = sizeof(float) * call.experts * (kRoutedTokens / split);
  const auto kernel = call.bfloat16 ? route_kernel<__nv_bfloat16> : route_kernel<__half>;
  const dim3 grid(split, pieces(call.tokens, kRoutedTokens));
  return launch(kernel, grid, 32 * kRouteWarps, shared, split, hopper, stream, call);
}

}  // namespace qload::cuda
