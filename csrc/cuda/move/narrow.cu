// Launches of narrow.cuh.
#include "narrow.h"

#include "narrow.cuh"

namespace qload::cuda {
namespace {

unsigned blocks(int64_t threads) { return static_cast<unsigned>((threads + kNarrowThreads - 1) / kNarrowThreads); }

template <int bits>
cudaError_t narrow_bits(const void* codes, int64_t count, void* words, uint32_t* seen, cudaStream_t stream) {
  narrow_codes<bits><<<blocks(count), kNarrowThreads, 0, stream>>>(static_cast<const uint4*>(codes), count,
                                                                  static_cast<uint32_t*>(words), seen);
  return cudaGetLastError();
}

template <int bits>
cudaError_t widen_bits(const void* words, int64_t count, void* codes, cudaStream_t stream) {
  widen_codes<bits><<<blocks(count * 8 / bits), kNarrowThreads, 0, stream>>>(static_cast<const uint32_t*>(words), count,
                                                                            static_cast<uint4*>(codes));
  return cudaGetLastError();
}

}  // namespace

cudaError_t narrow(int bits, const void* codes, int64_t count, void* words, uint32_t* seen, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (bits == 2) return narrow_bits<2>(codes, count, words, seen, stream);
  if (bits == 4) return narrow_bits<4>(codes, count, words, seen, stream);
  return narrow_bits<8>(codes, count, words, seen, stream);
}

cudaError_t widen(int bits, const void* words, int64_t count, void* codes, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (bits == 2) return widen_bits<2>(words, count, codes, stream);
  if (bits == 4) return widen_bits<4>(words, count, codes, stream);
  return widen_bits<8>(words, count, codes, stream);
}

}  // namespace qload::cuda
