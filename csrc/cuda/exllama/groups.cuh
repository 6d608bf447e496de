// What a lane needs of a group: the scales and zero points of its eight columns, 4c ... 4c + 3 of each half of a tile.
#pragma once

#include "codes.cuh"
#include "division.h"
#include "exllama.h"

namespace qload::cuda::exl {

template <class T, int bits>
struct Group {
  static constexpr int kWords = bits == 3 ? 2 : 1;  // four fields of 3 bits may lie in two words

  uint2 scales[2];
  uint32_t zeros[2][kWords];

  /// Those of a tile whose first column is `first`; nothing of columns that are not there.
  __device__ __forceinline__ void read(const Exllama& call, int group, int first, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = first + 32 * half;
      if (n + 4 * column >= call.N) continue;
      const T* from = static_cast<const T*>(call.scales) + int64_t{group} * call.N + n + 4 * column;
      scales[half] = __ldg(reinterpret_cast<const uint2*>(from));
      const uint32_t* words = static_cast<const uint32_t*>(call.zeros) + int64_t{group} * (call.N / 4 * bits / 8) + n / 32 * bits;
      const int at = 4 * column * bits / 32;
#pragma unroll
      for (int i = 0; i < kWords; ++i) zeros[half][i] = __ldg(words + min(at + i, bits - 1));
    }
  }

  __device__ __forceinline__ float scale(int half, int i) const {
    __align__(8) T own[4];
    memcpy(own, &scales[half], sizeof own);
    return wide(own[i]);
  }

  __device__ __forceinline__ float zero(const Exllama& call, int half, int column, int i) const {
    const int low = 4 * column * bits % 32 + bits * i;
    uint32_t field;
    if constexpr (bits == 3)
      field = (low < 32 ? __funnelshift_r(zeros[half][0], zeros[half][1], low) : zeros[half][1] >> (low - 32)) & 7;
    else
      field = (zeros[half][0] + call.zero_word) >> low & ((1 << bits) - 1);
    return float_of(field + call.zero_add & call.zero_mask);
  }
};

}  // namespace qload::cuda::exl
