// Transfer of a warp's sums from registers to shared memory, where the block adds them.
#pragma once

#include "../device/sums.cuh"
#include "decode.h"
#include "division.h"

namespace qload::cuda {

/// Store a warp's sums of its 64 columns in place of its x.
template <int token_tiles>
__device__ __forceinline__ void store_sums(int tokens, const float (&sum)[4][token_tiles][4], unsigned char* memory,
                                         int warp_bytes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* own = reinterpret_cast<float*>(memory + warp * warp_bytes) + lane % 4 * 2 * kSumPitch + lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * m + lane % 4 * 2 + i % 2 < tokens)
          own[(8 * m + i % 2) * kSumPitch + 16 * j + 8 * (i / 2)] = sum[j][m][i];
}

/// Store y of the block.
template <class T, int token_tiles>
__device__ __forceinline__ void store(const Decode& call, const Division& work, const float (&sum)[4][token_tiles][4],
                                      unsigned char* memory, int warp_bytes, float unit) {
  store_sums(call.M, sum, memory, warp_bytes);
  const int first = blockIdx.y * work.columns * kTileN;
  add_up(work, call.M, memory, warp_bytes, [&](int m, int n, float4 total) {
    if (call.token_scales) scale(total, call.token_scales[m]);
    put<T, false>(call.bias, call.y, call.outputs, m, first + n, total, unit);
  });
}

}  // namespace qload::cuda
