// Which expert a pair chose, and which pairs a block has.
#pragma once

#include "../device/ptx.cuh"
#include "experts.h"

namespace qload::cuda {

/// The expert of a pair, among those that are here; -1: it is elsewhere. Read from the L2: another kernel may have written
/// it since this one started.
__device__ __forceinline__ int expert_of(const Choice& choice, int pair) {
  const int64_t id = choice.wide ? __ldcg(static_cast<const long long*>(choice.ids) + pair)
                                 : __ldcg(static_cast<const int*>(choice.ids) + pair);
  if (id < 0 || id >= choice.total) return -1;
  const int here = choice.map ? __ldg(choice.map + id) : static_cast<int>(id);
  return here >= 0 && here < choice.experts ? here : -1;
}

__device__ __forceinline__ int pair_at(const int32_t* order, int place) { return order ? __ldcg(order + place) : place; }

}  // namespace qload::cuda
