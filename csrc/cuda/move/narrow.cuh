// Codes in int32 to packed words, and back.
//
//   words[i] = codes[i * P] | codes[i * P + 1] << bits | ...        P = 32 / bits
//
//   in   codes   int32, a multiple of the codes of a word, aligned to 16 bytes
//   out  words   int32
//        seen    int32 (1,)  OR of all codes and of its former value
//
//   grid     256 words per block, one per thread; int32 are read and written 16 bytes at a time. Memory is the limit.
#pragma once

#include <cstdint>

namespace qload::cuda {

constexpr int kNarrowThreads = 256;

template <int bits>
__global__ void __launch_bounds__(kNarrowThreads)
narrow_codes(const uint4* __restrict__ codes, int64_t count, uint32_t* __restrict__ words, uint32_t* seen) {
  constexpr int runs = 8 / bits, mask = (1 << bits) - 1;  // of four codes, in a word
  const int64_t at = int64_t{blockIdx.x} * kNarrowThreads + threadIdx.x;
  uint32_t all = 0, word = 0;
#pragma unroll
  for (int run = 0; run < runs; ++run) {
    const uint4 four = at < count ? codes[at * runs + run] : uint4{};
    all |= four.x | four.y | four.z | four.w;
    const uint32_t made = (four.x & mask) | (four.y & mask) << bits | (four.z & mask) << (2 * bits) |
                          (four.w & mask) << (3 * bits);
    word |= made << (4 * bits * run);
  }
  if (at < count) words[at] = word;
  all = __reduce_or_sync(~0u, all);
  if (threadIdx.x % 32 == 0 && (all & ~*seen)) atomicOr(seen, all);
}

template <int bits>
__global__ void __launch_bounds__(kNarrowThreads)
widen_codes(const uint32_t* __restrict__ words, int64_t count, uint4* __restrict__ codes) {
  constexpr int runs = 8 / bits, mask = (1 << bits) - 1;
  const int64_t at = int64_t{blockIdx.x} * kNarrowThreads + threadIdx.x;  // a run
  if (at >= count * runs) return;
  const uint32_t word = __ldg(words + at / runs) >> (at % runs * 4 * bits);
  codes[at] = uint4{word & mask, word >> bits & mask, word >> (2 * bits) & mask, word >> (3 * bits) & mask};
}

}  // namespace qload::cuda
