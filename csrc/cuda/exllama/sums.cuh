// Transfer of a warp's sums from registers to shared memory, where the block adds them.
#pragma once

#include "../device/sums.cuh"
#include "division.h"
#include "exllama.h"

namespace qload::cuda::exl {

/// Store y of the block. sum[j][m][2b + i] of a warp is column 32 (j / 2) + 4c + 2 (j % 2) + b of token 8m + 2t + i.
template <class T, int token_tiles>
__device__ __forceinline__ void store(const Exllama& call, const Division& work, int first_token, int tokens,
                                      const float (&sum)[4][token_tiles][4], unsigned char* memory, float unit) {
  constexpr int own_size = 8 * token_tiles * kSumPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* sums = reinterpret_cast<float*>(memory);
  float* own = sums + warp * own_size + lane / 4 * 4;
#pragma unroll
  for (int m = 0; m < token_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * m + lane % 4 * 2 + i;
      if (token >= tokens) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float4*>(own + token * kSumPitch + 32 * half) =
            make_float4(sum[2 * half][m][i], sum[2 * half][m][2 + i], sum[2 * half + 1][m][i], sum[2 * half + 1][m][2 + i]);
    }
  const int first = blockIdx.y * work.columns * kTileN;
  add_up(work, tokens, memory, own_size * 4, [&](int m, int n, float4 total) {
    put<T, true>(call.bias, call.y, call.N, first_token + m, first + n, total, unit);
  });
}

}  // namespace qload::cuda::exl
