// Steps around the products of experts: rows of x in order, gate and up combined, and the sum over a token's choices.
//
//   in, out  see experts.h; sums in fp32, rounded once; memory is the limit
//   needs    K in multiples of 8
//   grid     (rows, pieces of a row), 128 threads with 4 or 8 columns each
#pragma once

#include <type_traits>

#include "../device/number.cuh"
#include "choice.cuh"
#include "gate.cuh"

namespace qload::cuda {

constexpr int kRowThreads = 128, kTogether = 8;

/// Up to four elements of a row, of which `left` exist; all at once if rows are multiples of four.
template <class From>
__device__ __forceinline__ void load_four(From (&to)[4], const From* from, int left, bool whole) {
  using Four = std::conditional_t<sizeof(From) == 4, float4, uint2>;
  if (whole) {
    *reinterpret_cast<Four*>(to) = *reinterpret_cast<const Four*>(from);
  } else {
    for (int i = 0; i < 4; ++i) to[i] = i < left ? from[i] : From{};
  }
}

/// Pair and expert of a row; -1: none, or on another rank.
struct Owner {
  int pair, expert;

  __device__ __forceinline__ Owner(const Choice& choice, const int32_t* order, int row)
      : pair(row < choice.pairs ? pair_at(order, row) : -1), expert(pair >= 0 ? expert_of(choice, pair) : -1) {}
};

template <class T>
__global__ void __launch_bounds__(kRowThreads) gather_kernel(const __grid_constant__ Gather call) {
  let_dependents_start();
  wait_for_earlier_kernels();
  const int row = blockIdx.x, k = (blockIdx.y * kRowThreads + threadIdx.x) * 8;
  if (k >= call.K) return;
  const Owner own(call.choice, call.order, row);
  const T* x = static_cast<const T*>(call.x) + int64_t{call.sharing ? max(own.pair, 0) / call.sharing : row} * call.inputs;
  __align__(16) T values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int source = own.expert < 0 ? -1 : call.perm ? call.perm[int64_t{own.expert} * call.K + k + i] : k + i;
    values[i] = source >= 0 && source < call.inputs ? x[source] : narrow<T>(0);
  }
  if (call.factors && own.expert >= 0) {
    const float factor = __ldcg(call.factors + own.pair);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = narrow<T>(factor * wide(values[i]));
  }
  *reinterpret_cast<uint4*>(static_cast<T*>(call.to) + int64_t{row} * call.K + k) =
      *reinterpret_cast<const uint4*>(values);
}

/// One thread per row of the output; grid.y: one of the two values.
__global__ void __launch_bounds__(kRowThreads) spread_kernel(const __grid_constant__ Spread call) {
  let_dependents_start();
  wait_for_earlier_kernels();
  const int row = blockIdx.x * kRowThreads + threadIdx.x;
  if (row >= call.rows) return;
  const int expert = Owner(call.choice, call.order, row).expert;
  const float* values = call.values[blockIdx.y];
  call.to[blockIdx.y * int64_t{call.rows} + row] = values && expert >= 0 ? values[expert] : 1.0f;
}

template <class From, class T>
__global__ void __launch_bounds__(kRowThreads) gated_kernel(const __grid_constant__ Gated call) {
  let_dependents_start();
  wait_for_earlier_kernels();
  const int row = blockIdx.x;
  const bool there = Owner(call.choice, call.order, row).expert >= 0;
  const From* x = static_cast<const From*>(call.x) + int64_t{row} * 2 * call.columns;
  T* y = static_cast<T*>(call.y) + int64_t{row} * call.pitch;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = (blockIdx.y * 4 + i) * kRowThreads + threadIdx.x;
    const bool made = there && n < call.columns;
    if (n < call.pitch) y[n] = narrow<T>(made ? gated(call.gate, wide(x[n]), wide(x[call.columns + n])) : 0.0f);
  }
}

template <class From, class T>
__global__ void __launch_bounds__(kRowThreads) combine_kernel(const __grid_constant__ Combine call) {
  let_dependents_start();
  const int m = blockIdx.x, n = (blockIdx.y * kRowThreads + threadIdx.x) * 4;
  if (n >= call.columns) return;
  float sums[4] = {};
  bool wrong = false;  // an expert number out of range, unchecked by the host
  for (int first = 0; first < call.top; first += kTogether) {
    int rows[kTogether];
    float weights[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {  // loads of a round are in flight together
      const int pair = m * call.top + first + i;
      const bool there = first + i < call.top;
      weights[i] = there && call.weights ? __ldcg(call.weights + pair) : 1;
      const int64_t id = there ? id_of(call.choice, pair) : 0;
      wrong |= !is_expert(call.choice, id);
      rows[i] = there && place_of(call.choice, id) >= 0 ? pair_at(call.places, pair) : -1;
    }
    // All data but x precede the products; their first kernel waited for them before this one could start.
    if (first == 0) wait_for_earlier_kernels();
    __align__(16) From values[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (rows[i] >= 0) {
        const From* from = static_cast<const From*>(call.x) + int64_t{rows[i]} * call.columns + n;
        load_four(values[i], from, call.columns - n, call.columns % 4 == 0);
      }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (rows[i] >= 0) sums[j] = fmaf(weights[i], wide(values[i][j]), sums[j]);
  }
  T* y = static_cast<T*>(call.y) + int64_t{m} * call.columns + n;
  for (int i = 0; i < 4; ++i)
    if (n + i < call.columns) y[i] = narrow<T>(wrong ? __int_as_float(0x7FFFFFFF) : sums[i]);
}

}  // namespace qload::cuda
