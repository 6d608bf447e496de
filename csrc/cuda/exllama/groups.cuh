// A lane's part of a group: scales and zero points of its eight columns, 4c ... 4c + 3 of each half of a tile.
#pragma once

#include "codes.cuh"
#include "division.h"
#include "exllama.h"

namespace qload::cuda::exl {

template <class T, int bits>
struct Group {
  static constexpr int kWords = bits == 3 ? 2 : 1;  // four fields of 3 bits may span two words

  uint2 scales[2];
  uint32_t zeros[2][kWords];

/// Load for the tile with first column `first`; columns beyond the last are skipped.
  __device__ __forceinline__ void read(const Exllama& call, int group, int first, int column) {
    const T* scales_at = static_cast<const T*>(call.scales) + first + 4 * column + int64_t{group} * call.N;
    const uint32_t* zeros_at = static_cast<const uint32_t*>(call.zeros) + first / 32 * bits;
    zeros_at += int64_t{group} * static_cast<int>(static_cast<unsigned>(call.N) / 4 * bits / 8);
    const int at = 4 * column * bits / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (first + 32 * half + 4 * column >= call.N) continue;
      scales[half] = __ldg(reinterpret_cast<const uint2*>(scales_at + 32 * half));
#pragma unroll
      for (int i = 0; i < kWords; ++i) zeros[half][i] = __ldg(zeros_at + half * bits + min(at + i, bits - 1));
    }
  }

  __device__ __forceinline__ float scale(int half, int i) const {
    __align__(8) T own[4];
    memcpy(own, &scales[half], sizeof own);
    return wide(own[i]);
  }

  /// The four fields of a half, from the lowest bit.
  __device__ __forceinline__ uint32_t fields(const Exllama& call, int half, int column) const {
    const int low = 4 * column * bits % 32;
    if constexpr (bits == 3) return __funnelshift_r(zeros[half][0], zeros[half][1], low);
    return (zeros[half][0] + call.zero_word) >> low;
  }

/// A zero point in the units of products with codes.
  static __device__ __forceinline__ float zero(const Exllama& call, uint32_t fields, int i) {
    const uint32_t field = fields >> (bits * i) & ((1 << bits) - 1);
    const uint32_t zero = field + call.zero_add & call.zero_mask;
    return __uint_as_float(0x4B000000 | zero) - (8388608.0f - Codes<T, bits>::kOffset);  // exact
  }
};

}  // namespace qload::cuda::exl
