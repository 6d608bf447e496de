// Product of the activated gate and up of each token.
//
//   y[m, i] = rounded(act(x[m, i]) * x[m, columns + i])      act: see Gate in ../experts/experts.h
//
//   in, out  see GateRows in step.h
//   needs    columns % 8 == 0; all aligned to 16 bytes
//   grid     (rows, pieces of columns), kGateThreads threads with eight columns each
//   The limit is the latency of one read and one write.
//
// Equals `GatedActivation` in fp32, rounded once (qload/experts/activation.py).
#pragma once

#include "../experts/gate.cuh"
#include "eight.cuh"
#include "step.h"

namespace qload::cuda {

constexpr int kGateThreads = 128;

template <class T>
__global__ void __launch_bounds__(kGateThreads) gate_pairs_kernel(const __grid_constant__ GateRows call) {
  const int count = call.columns / 8, at = blockIdx.y * kGateThreads + threadIdx.x;
  let_dependents_start();
  wait_for_earlier_kernels();
  if (at >= count) return;
  const int64_t row = int64_t{blockIdx.x} * 2 * count;
  Eight<T> gate = eight<T>(call.x, row + at);
  const Eight<T> up = eight<T>(call.x, row + count + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) gate.set(i, gated(call.gate, gate[i], up[i]));
  put(call.y, int64_t{blockIdx.x} * count + at, gate);
}

}  // namespace qload::cuda
