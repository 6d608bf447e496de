// Inputs of each token in the order of a weight's rows.
//
//   y[m, i] = perm[i] < inputs ? x[m, perm[i]] : 0
//
//   in   see gather.h
//   out  y      16-bit numbers (M, rows), bit-equal to those of x
//
//   grid     (slices of rows, M), kThreads threads, each with eight neighbouring rows at a time
//   A scattered read costs 32 bytes from memory or the L1, and almost nothing from shared memory. So a block first
//   copies its token to shared memory, if it reads much of it.
//   perm is loaded before the previous kernel has ended: only x may depend on that kernel.
//
// Equals torch.index_select of x padded with zeros (qload/kernels/cuda/launch.py).
#pragma once

#include "../device/ptx.cuh"
#include "gather.h"

namespace qload::cuda {

constexpr int kGatherThreads = 256;

template <bool staged>
__global__ void __launch_bounds__(kGatherThreads) gather_inputs_kernel(const __grid_constant__ GatherInputs call) {
  extern __shared__ __align__(16) unsigned char memory[];
  const auto* token = static_cast<const uint16_t*>(call.x) + int64_t{blockIdx.y} * call.inputs;
  auto* own = reinterpret_cast<uint16_t*>(memory);
  auto* y = static_cast<uint16_t*>(call.y) + int64_t{blockIdx.y} * call.rows;
  const int step = gridDim.x * kGatherThreads, first = blockIdx.x * kGatherThreads + threadIdx.x, last = call.rows / 8;

  let_dependents_start();
  const auto* perm = reinterpret_cast<const int4*>(call.perm);
  const auto start_load = [&](int at, int4 (&places)[2]) {
    if (at < last) places[0] = __ldg(perm + 2 * at), places[1] = __ldg(perm + 2 * at + 1);
  };
  int4 next[2];
  start_load(first, next);
  wait_for_earlier_kernels();

  if constexpr (staged) {
    if (call.inputs % 8 == 0 && reinterpret_cast<uintptr_t>(call.x) % 16 == 0) {
      for (int i = threadIdx.x; i < call.inputs / 8; i += kGatherThreads)
        reinterpret_cast<uint4*>(own)[i] = reinterpret_cast<const uint4*>(token)[i];
    } else {
      for (int i = threadIdx.x; i < call.inputs; i += kGatherThreads) own[i] = token[i];
    }
    __syncthreads();
    token = own;
  }
  for (int at = first; at < last; at += step) {
    const int places[8] = {next[0].x, next[0].y, next[0].z, next[0].w, next[1].x, next[1].y, next[1].z, next[1].w};
    start_load(at + step, next);
    uint32_t eight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto one = [&](int place) -> uint32_t {
        return static_cast<unsigned>(place) < static_cast<unsigned>(call.inputs) ? token[place] : 0;
      };
      eight[i] = one(places[2 * i]) | one(places[2 * i + 1]) << 16;
    }
    reinterpret_cast<uint4*>(y)[at] = make_uint4(eight[0], eight[1], eight[2], eight[3]);
  }
}

}  // namespace qload::cuda
