// The list of kernels of many.cuh. half.cu and bfloat16.cu compile it, side by side.
#pragma once

#include "many.cuh"

namespace qload::cuda {

using ManyKernel = void (*)(const many_room::Matrices, const Many, const many_room::Work);

/// The kernel for a call, or null where no block has so many tokens and columns.
ManyKernel many_of_half(const Many& call);
ManyKernel many_of_bfloat16(const Many& call);

template <class T, bool has_zeros, bool small>
ManyKernel of_shape(int tokens, int columns) {
#define QLOAD_SHAPE(m, n) \
  if (tokens == m && columns == n) return many_room::many_kernel<T, has_zeros, small, m, n>;
  QLOAD_SHAPE(32, 128) QLOAD_SHAPE(32, 256) QLOAD_SHAPE(32, 512) QLOAD_SHAPE(64, 128) QLOAD_SHAPE(64, 256)
  QLOAD_SHAPE(64, 512) QLOAD_SHAPE(96, 256) QLOAD_SHAPE(128, 128) QLOAD_SHAPE(128, 256) QLOAD_SHAPE(192, 128)
  QLOAD_SHAPE(256, 128)
#undef QLOAD_SHAPE
  return nullptr;
}

template <class T, bool has_zeros>
ManyKernel of_groups(const Many& call) {
  return call.group < many_room::kStage ? of_shape<T, has_zeros, true>(call.tokens, call.columns)
                             : of_shape<T, has_zeros, false>(call.tokens, call.columns);
}

template <class T>
ManyKernel many_of(const Many& call) {
  return call.zeros ? of_groups<T, true>(call) : of_groups<T, false>(call);
}

}  // namespace qload::cuda
