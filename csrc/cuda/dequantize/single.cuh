// Unpacked codes to rows of floats, for every format.
//
//   out[n, k] = round((value(code[n, k]) - zero[n, k]) * scale[n, k] * factor)
//
//   in   codes   one integer each, with strides
//        meaning scales fp32, fp16, bf16; zero points in words, int32, one for all, or none (meaning.h)
//   out  out     fp32, fp16, bf16  (N, K)
//
//   grid     (K / 32, N / 32), 32 x 8 threads; if neighbours in memory are outputs, a tile passes through shared memory
//
// Equals Codes.dequantize (qload/spec/weight.py) rounded once to the type of `out`, bit for bit.
#pragma once

#include <cstdint>

#include "meaning.cuh"

namespace qload::cuda {

constexpr int kTile = 32, kTileRows = 8;

struct Single {  // one integer per code
  int64_t N, K, stride_n, stride_k;
};

template <class Out, class Code>
__global__ void __launch_bounds__(kTile * kTileRows)
dequantize_single(const __grid_constant__ Meaning meaning, const __grid_constant__ Single single,
                  const Code* __restrict__ codes, Out* __restrict__ out) {
  __shared__ int32_t tile[kTile][kTile + 1];
  const bool across = single.stride_k > single.stride_n;  // neighbours in memory are outputs, not inputs
  const float* lookup = reinterpret_cast<const float*>(meaning.lookup);
  for (int64_t n0 = int64_t{blockIdx.y} * kTile; n0 < single.N; n0 += int64_t{gridDim.y} * kTile) {
    const int64_t k0 = int64_t{blockIdx.x} * kTile;
    for (int i = threadIdx.y; i < kTile; i += kTileRows) {
      const int dn = across ? threadIdx.x : i, dk = across ? i : threadIdx.x;
      if (n0 + dn < single.N && k0 + dk < single.K)
        tile[dn][dk] = static_cast<int32_t>(codes[(n0 + dn) * single.stride_n + (k0 + dk) * single.stride_k]);
    }
    __syncthreads();
    for (int i = threadIdx.y; i < kTile; i += kTileRows) {
      const int64_t n = n0 + i, k = k0 + threadIdx.x;
      if (n >= single.N || k >= single.K) continue;
      const int32_t code = tile[i][threadIdx.x];
      const float value = lookup ? lookup[code] : static_cast<float>(code);
      round_to(meant(meaning, affine_at(meaning, n, k), value), out[n * single.K + k]);
    }
    __syncthreads();
  }
}

}  // namespace qload::cuda
