// The list of kernels of many.cuh, compiled in parallel by a file for each type and width.
#pragma once

#include "many.cuh"

namespace qload::cuda {

template <class T, Code code, many_room::Zeros zeros, bool small>
ManyKernel of_shape(const Many& call) {
#define QLOAD_SHAPE(m, n, t)                                    \
  if (call.tokens == m && call.columns == n && call.teams == t) \
    return many_room::many_kernel<T, code, zeros, small, m, n, t>;
  QLOAD_SHAPE(32, 128, 1) QLOAD_SHAPE(64, 128, 1) QLOAD_SHAPE(96, 256, 1) QLOAD_SHAPE(128, 128, 1)
  QLOAD_SHAPE(128, 192, 1) QLOAD_SHAPE(128, 256, 1) QLOAD_SHAPE(160, 128, 1) QLOAD_SHAPE(160, 256, 1)
  QLOAD_SHAPE(192, 128, 1) QLOAD_SHAPE(224, 128, 1)
  QLOAD_SHAPE(32, 64, 2) QLOAD_SHAPE(32, 128, 2) QLOAD_SHAPE(64, 64, 2) QLOAD_SHAPE(64, 128, 2)
  if constexpr (bits_of(code) == 4) {  // of 8 bits some lack room for two stages of weights, and one is slower than others
    QLOAD_SHAPE(32, 512, 1) QLOAD_SHAPE(64, 512, 1) QLOAD_SHAPE(96, 128, 2)
  } else {  // conversion of 8-bit operands takes longer
    QLOAD_SHAPE(32, 256, 1) QLOAD_SHAPE(256, 128, 1)
  }
#undef QLOAD_SHAPE
  return nullptr;
}

template <class T, Code code, many_room::Zeros zeros>
ManyKernel of_groups(const Many& call) {
  return call.group < many_room::kStage ? of_shape<T, code, zeros, true>(call) : of_shape<T, code, zeros, false>(call);
}

/// Few shapes, to keep the build short.
template <class T, Code code>
ManyKernel of_offsets(const Many& call) {
#define QLOAD_SHAPE(m, n, t)                                    \
  if (call.tokens == m && call.columns == n && call.teams == t) \
    return many_room::many_kernel<T, code, many_room::Zeros::kOffsets, true, m, n, t>;
  QLOAD_SHAPE(32, 128, 2) QLOAD_SHAPE(64, 128, 2) QLOAD_SHAPE(128, 128, 1) QLOAD_SHAPE(128, 256, 1)
#undef QLOAD_SHAPE
  return nullptr;
}

template <class T, Code code, many_room::Zeros zeros, bool small>
ManyKernel of_experts_and_shape(const Many& call) {
#define QLOAD_SHAPE(m, n) \
  if (call.tokens == m && call.columns == n) return many_room::many_kernel<T, code, zeros, small, m, n, 1, true>;
  QLOAD_SHAPE(32, 256) QLOAD_SHAPE(64, 256) QLOAD_SHAPE(128, 256)
  if constexpr (bits_of(code) == 4) {
    QLOAD_SHAPE(32, 512) QLOAD_SHAPE(64, 512)
  }
#undef QLOAD_SHAPE
  return nullptr;
}

template <class T, Code code>
ManyKernel many_experts_of(const Many& call) {
  if constexpr (is_scaled(code))
    return of_experts_and_shape<T, code, many_room::Zeros::kSame, true>(call);
  else if constexpr (is_number(code))
    return of_experts_and_shape<T, code, many_room::Zeros::kSame, false>(call);
  else if (call.group < many_room::kStage)
    return call.zeros ? of_experts_and_shape<T, code, many_room::Zeros::kPoints, true>(call) : of_experts_and_shape<T, code, many_room::Zeros::kSame, true>(call);
  else
    return call.zeros ? of_experts_and_shape<T, code, many_room::Zeros::kPoints, false>(call) : of_experts_and_shape<T, code, many_room::Zeros::kSame, false>(call);
}

template <class T, Code code>
ManyKernel many_of(const Many& call) {
  if constexpr (is_scaled(code))
    return of_shape<T, code, many_room::Zeros::kSame, true>(call);
  else if constexpr (is_number(code))
    return of_shape<T, code, many_room::Zeros::kSame, false>(call);
  else if (call.offset_zero >= 0)
    return of_offsets<T, code>(call);
  else
    return call.zeros ? of_groups<T, code, many_room::Zeros::kPoints>(call) : of_groups<T, code, many_room::Zeros::kSame>(call);
}

}  // namespace qload::cuda
