// Launches of attend.cuh.
#include <algorithm>

#include "../device/launch.h"
#include "attend.cuh"
#include "step.h"

namespace qload::cuda {
namespace {

using Kernel = void (*)(const AttendPages);

template <class T, int kHeads>
Kernel of_lanes(int size) {
  if (size <= 64) return attend_kernel<T, kHeads, 8>;
  return size <= 128 ? attend_kernel<T, kHeads, 16> : attend_kernel<T, kHeads, 32>;
}

template <class T>
Kernel of_heads(int heads, int size) {
  if (heads == 1) return of_lanes<T, 1>(size);
  if (heads == 2) return of_lanes<T, 2>(size);
  return heads == 4 ? of_lanes<T, 4>(size) : of_lanes<T, 8>(size);
}

bool fits(const AttendPages& call) {
  for (const int each : {call.k_size, call.v_size, call.k_pitch, call.v_pitch})
    if (each < 8 || each % 8) return false;
  const bool sizes = std::max(call.k_size, call.v_size) <= 256 && call.k_size <= call.k_pitch && call.v_size <= call.v_pitch;
  for (const void* each : {call.q, call.keys, call.values, static_cast<const void*>(call.y)})
    if (reinterpret_cast<uintptr_t>(each) % 16) return false;
  constexpr int kMost = 65535;  // limit of a grid
  return sizes && call.kv > 0 && call.heads % call.kv == 0 && call.heads <= kMost && call.sequences <= kMost &&
         int64_t{call.page_size} * call.width < 1 << 30 && call.page_size > 0;
}

}  // namespace

cudaError_t attend_pages(const AttendPages& call, cudaStream_t stream) {
  if (call.sequences == 0 || call.heads == 0) return cudaSuccess;
  if (!fits(call)) return cudaErrorNotSupported;
  const Device device = this_device();
  const int group = call.heads / call.kv;
  int heads = 1;
  while (heads < group && heads < 8) heads *= 2;
  int split = device.major >= 9 ? kMostSplit : 1;
  const auto blocks = [&](int heads) { return int64_t{split} * call.kv * ((group + heads - 1) / heads) * call.sequences; };
  while (heads > 1 && blocks(heads / 2) <= device.multiprocessors) heads /= 2;  // idle ones take heads of the same keys
  const int tiles = (group + heads - 1) / heads;
  // Twice as many blocks as fit on all multiprocessors, for every length of the text: so no result depends on the width
  // of a page table.
  while (split > 1 && blocks(heads) > 2 * device.multiprocessors) split /= 2;
  const int size = std::max(call.k_size, call.v_size), shared = 4 * AttendRoom(heads, call.v_size, split).total;
  const Kernel kernel = call.bfloat16 ? of_heads<__nv_bfloat16>(heads, size) : of_heads<__half>(heads, size);
  if (const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared)) return error;
  return launch(kernel, dim3(split, call.kv * tiles, call.sequences), 32 * kAttendWarps, shared, split,
                device.major >= 9, stream, call);
}

}  // namespace qload::cuda
