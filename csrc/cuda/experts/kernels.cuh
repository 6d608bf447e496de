// List of the kernels of experts.cuh, compiled in parallel by a file for each type of x and kind of codes.
#pragma once

#include "experts.cuh"

namespace qload::cuda {

template <class T, Code code, Groups groups>
ExpertsKernel experts_of(const Experts& call) {
  return call.tokens == 8 ? experts_kernel<T, code, 1, groups> : experts_kernel<T, code, 2, groups>;
}

template <class T>
ExpertsKernel integer_experts_of(const Experts& call, bool small) {
  if (call.code == Code::kUint4)
    return small ? experts_of<T, Code::kUint4, Groups::kSmall>(call) : experts_of<T, Code::kUint4, Groups::kChunks>(call);
  return small ? experts_of<T, Code::kUint8, Groups::kSmall>(call) : experts_of<T, Code::kUint8, Groups::kChunks>(call);
}

template <class T>
ExpertsKernel number_experts_of(const Experts& call) {
  return call.code == Code::kInt8   ? experts_of<T, Code::kInt8, Groups::kTiles>(call)
         : call.code == Code::kE4m3 ? experts_of<T, Code::kE4m3, Groups::kTiles>(call)
                                    : nullptr;
}

template <class T>
ExpertsKernel scaled_experts_of(const Experts& call) {
  return call.code == Code::kE2m1    ? experts_of<T, Code::kE2m1, Groups::kScaled>(call)
         : call.code == Code::kMxfp8 ? experts_of<T, Code::kMxfp8, Groups::kScaled>(call)
                                     : experts_of<T, Code::kNf4, Groups::kScaled>(call);
}

}  // namespace qload::cuda
