// Operands of rows with a group index each: (code - zero point) * scale, rounded to T.
#pragma once

#include "decode.h"
#include "division.h"
#include "operands.cuh"

namespace qload::cuda {

/// Operands of 32 rows at `row`, in Marlin's order.
template <class T, int bits>
__device__ __forceinline__ void scaled_pair(const Decode& call, const uint32_t (&words)[bits / 2][4], int row, int tile,
                                            int j, uint32_t (&to)[2][4]) {
  const int column = threadIdx.x % 32 / 4, at = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        T two[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int k = row + 16 * i + 8 * h + at + r;
          const int64_t group = k < call.K ? call.g_idx[k] : 0, n = group * call.N + tile * kTileN;
          uint32_t zero = 1 << (bits - 1);
          if (call.zeros) {
            uint32_t zeros[bits / 4];
            memcpy(zeros, static_cast<const uint32_t*>(call.zeros) + n * bits / 32 + column * (bits / 4), sizeof zeros);
            zero = zero_of<bits>(zeros, j, b);
          }
          const uint32_t code = bits == 4 ? words[i][j] >> (4 * (4 * r + 2 * b + h)) & 15
                                          : words[2 * i + j / 2 & (bits / 2 - 1)][j % 2 * 2 + b] >>
                                                    (8 * (2 * r + h)) & 255;
          const T scale = static_cast<const T*>(call.scales)[n + column * 8 + 2 * j + b];
          two[r] = narrow<T>((float_of(code) - float_of(zero)) * wide(scale));
        }
        memcpy(&to[i][2 * h + b], two, 4);
      }
}

}  // namespace qload::cuda
