// The chosen expert of a pair, and the pair of a row.
#pragma once

#include "../device/ptx.cuh"
#include "experts.h"

namespace qload::cuda {

/// The expert number of a pair. Read from the L2: another kernel may have written it after this one started.
__device__ __forceinline__ int64_t id_of(const Choice& choice, int pair) {
  return choice.wide ? __ldcg(static_cast<const long long*>(choice.ids) + pair)
                     : __ldcg(static_cast<const int*>(choice.ids) + pair);
}

/// Whether a number is that of an expert, on this rank or another.
__device__ __forceinline__ bool is_expert(const Choice& choice, int64_t id) { return id >= 0 && id < choice.total; }

/// Index of an expert on this rank; -1: it is on another rank, or invalid.
__device__ __forceinline__ int place_of(const Choice& choice, int64_t id) {
  if (!is_expert(choice, id)) return -1;
  const int here = choice.map ? __ldg(choice.map + id) : static_cast<int>(id);
  return here >= 0 && here < choice.experts ? here : -1;
}

__device__ __forceinline__ int expert_of(const Choice& choice, int pair) { return place_of(choice, id_of(choice, pair)); }

__device__ __forceinline__ int pair_at(const int32_t* order, int place) { return order ? __ldcg(order + place) : place; }

}  // namespace qload::cuda
