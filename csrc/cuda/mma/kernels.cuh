// List of the kernels of mma.cuh, compiled in parallel by a file for each type of x.
#pragma once

#include "mma.cuh"

namespace qload::cuda {

template <class T, Code code>
MmaKernel mma_of_tokens(int tokens) {
  switch (tokens) {
    case 32: return mma_room::mma_kernel<T, code, 4>;
    case 48: return mma_room::mma_kernel<T, code, 6>;
    case 64: return mma_room::mma_kernel<T, code, 8>;
  }
  return nullptr;
}

template <class T>
MmaKernel mma_of(const Mma& call) {
  switch (call.code) {
    case Code::kUint4: return mma_of_tokens<T, Code::kUint4>(call.tokens);
    case Code::kUint8: return mma_of_tokens<T, Code::kUint8>(call.tokens);
    case Code::kInt8: return mma_of_tokens<T, Code::kInt8>(call.tokens);
    case Code::kE4m3: return mma_of_tokens<T, Code::kE4m3>(call.tokens);
    case Code::kE5m2: return mma_of_tokens<T, Code::kE5m2>(call.tokens);
    case Code::kMxfp8: return mma_of_tokens<T, Code::kMxfp8>(call.tokens);
    case Code::kE2m1: return mma_of_tokens<T, Code::kE2m1>(call.tokens);
    case Code::kNf4:
    case Code::kBnbFp4: return mma_of_tokens<T, Code::kNf4>(call.tokens);
  }
  return nullptr;
}

}  // namespace qload::cuda
