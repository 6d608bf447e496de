// List of the kernels of mma.cuh, compiled in parallel by a file for each type of x.
#pragma once

#include "mma.cuh"

namespace qload::cuda {

/// Scales in fp32 leave no registers for 64 tokens.
template <class T, Code code, mma_room::Offsets offsets = mma_room::Offsets::kNone>
MmaKernel mma_of_tokens(int tokens) {
  switch (tokens) {
    case 32: return mma_room::mma_kernel<T, code, 4, offsets>;
    case 48: return mma_room::mma_kernel<T, code, 6, offsets>;
    case 64:
      if constexpr (offsets != mma_room::Offsets::kWide) return mma_room::mma_kernel<T, code, 8, offsets>;
  }
  return nullptr;
}

template <class T, mma_room::Offsets offsets>
MmaKernel mma_of_offsets(const Mma& call) {
  return call.code == Code::kUint4   ? mma_of_tokens<T, Code::kUint4, offsets>(call.tokens)
         : call.code == Code::kUint8 ? mma_of_tokens<T, Code::kUint8, offsets>(call.tokens)
                                     : nullptr;
}

template <class T>
MmaKernel mma_of(const Mma& call) {
  if (call.wide) return mma_of_offsets<T, mma_room::Offsets::kWide>(call);
  if (call.offset_zero >= 0) return mma_of_offsets<T, mma_room::Offsets::kNarrow>(call);
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
