// x times the weights of the experts that tokens chose, few tokens an expert, in our own order.
//
//   y[pair, n] = factor[pair] * sum over k of x[pair / sharing, k] * scale[e, g, n] * (code[e, k, n] - zero[e, g, n])
//                + bias[e, n]                                           e: the pair's expert, g = k / group
//   of gated ones y[pair, n] = act(that of n) * that of n + outputs / 2
//
//   in   see experts.h
//   out  y    fp32 (pairs, outputs); of gated ones fp16 or bf16 (pairs, pitch), rounded once
//
//   needs    K in multiples of 128, N of 64, of gated ones 128
//   grid     (tiles / columns, items), columns * row_warps warps
//   A block has tiles of one expert, of gated ones a tile of the gate and that of the up beside it, and takes the item's
//   pairs 8 or 16 at a time; warps work as in decode/decode.cuh. Which warp takes which rows of K depends on the layer
//   alone, and warps are added in order, so no other pair and no number of pairs changes a bit of y.
//   Several blocks are on a multiprocessor: while one starts or ends, the others read. Memory is the limit.
//
// Equals x @ expert.dequantize().T (qload/kernel_formats/strips.py) up to the rounding of fp32 sums.
#pragma once

#include "../decode/decode.cuh"
#include "choice.cuh"
#include "gate.cuh"

namespace qload::cuda {

/// Registers of a thread: three blocks of six warps are on a multiprocessor, or two of 16 tokens.
constexpr int most_registers(int token_tiles) { return token_tiles == 1 ? 112 : 168; }

/// What `decode` would be called with for one expert; M is set later.
template <int bits>
__device__ __forceinline__ Decode of_expert(const Experts& call, int expert) {
  const int64_t groups = call.group >= call.K ? 1 : call.K / call.group, N = call.N;
  Decode own{};
  own.x = call.x;
  own.weights = static_cast<const unsigned char*>(call.weights) + expert * (N * call.K * bits / 8);
  own.scales = static_cast<const unsigned char*>(call.scales) + expert * (groups * N * 2);
  if (call.zeros) own.zeros = static_cast<const unsigned char*>(call.zeros) + expert * (groups * N * bits / 8);
  own.K = own.inputs = call.K, own.N = call.N, own.bits = bits, own.group = call.group, own.own = true;
  return own;
}

/// Stores what warps have laid down of `tokens` pairs.
template <class T>
struct Stored {
  const Experts& call;
  const Chunks& work;
  const unsigned char* memory;
  int warp_bytes, expert;
  float unit;

  /// `pair_of(m)`: of the block's tokens.
  template <class PairOf>
  __device__ __forceinline__ void store(int tokens, const PairOf& pair_of) const {
    const int columns = call.gated ? 1 : work.columns, first = blockIdx.x * columns * kTileN;
    for (int i = threadIdx.x; i < columns * (kTileN / 4) * tokens; i += blockDim.x) {
      const int m = i / 16 / columns, tile = i / 16 - m * columns, n = first + tile * kTileN + i % 16 * 4;
      const unsigned char* at = memory + tile * warp_bytes + (m * kSumPitch + i % 16 * 4) * 4;
      const int pair = pair_of(m);
      const float factor = call.factors ? __ldcg(call.factors + pair) * unit : unit;
      if (call.gated)
        store_gated(at, pair, n, factor);
      else
        store_plain(at, pair, n, factor);
    }
  }

 private:
  __device__ __forceinline__ void store_gated(const unsigned char* at, int pair, int n, float factor) const {
    float a[4], b[4];
    values(at, n, factor, a), values(at + warp_bytes, call.outputs / 2 + n, factor, b);
    __align__(8) T made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) made[i] = narrow<T>(gated(call.gate, a[i], b[i]));
    *reinterpret_cast<uint2*>(static_cast<T*>(call.y) + int64_t{pair} * call.pitch + n) =
        *reinterpret_cast<const uint2*>(made);
  }
  __device__ __forceinline__ void store_plain(const unsigned char* at, int pair, int n, float factor) const {
    float own[4];
    values(at, n, factor, own);
    float* to = static_cast<float*>(call.y) + int64_t{pair} * call.outputs + n;
    if (call.outputs % 4 == 0) {
      if (n < call.outputs) *reinterpret_cast<float4*>(to) = make_float4(own[0], own[1], own[2], own[3]);
    } else {
      for (int i = 0; i < 4; ++i)
        if (n + i < call.outputs) to[i] = own[i];
    }
  }
  /// Four columns of a token.
  __device__ __forceinline__ void values(const unsigned char* at, int n, float factor, float (&to)[4]) const {
    const float4 sums = of_warps(work, at, warp_bytes);
    to[0] = sums.x * factor, to[1] = sums.y * factor, to[2] = sums.z * factor, to[3] = sums.w * factor;
    if (!call.bias) return;
    const T* bias = static_cast<const T*>(call.bias) + int64_t{expert} * call.outputs + n;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (n + i < call.outputs) to[i] += wide(bias[i]);
  }
};

template <class T, int bits, int token_tiles, Groups groups>
__global__ void __maxnreg__(most_registers(token_tiles))
experts_kernel(const __grid_constant__ Experts call, const __grid_constant__ Chunks shape) {
#if __CUDA_ARCH__ >= 900  // no other chip has weights in this order
  constexpr int own_bytes = warp_bytes(8 * token_tiles, Order::kOwn), kept = token_tiles == 1 ? 8 : bits;
  extern __shared__ __align__(128) unsigned char memory[];

  // Who comes next may read what was known when this kernel waited: it starts once all blocks have.
  if (!call.known) wait_for_earlier_kernels();
  let_dependents_start();
  const Item item = item_of(call, blockIdx.y);
  if (item.count == 0) return wait_for_earlier_kernels();  // who comes next takes all before as done

  Decode own = of_expert<bits>(call, item.expert);
  Chunks work = shape;
  work.runs = true;
  const int warp = threadIdx.x / 32, row_warp = warp / work.columns, column = warp % work.columns;
  const int tile = call.gated ? blockIdx.x + column * (call.N / kTileN / 2) : blockIdx.x * work.columns + column;
  const bool busy = tile < call.N / kTileN && row_warp < work.chunks;
  const Stored<T> stored{call, work, memory, own_bytes, item.expert, Codes<T, bits>::kUnit};

#pragma unroll 1
  for (int done = 0; done < item.count; done += 8 * token_tiles) {
    own.M = min(8 * token_tiles, item.count - done);
    const auto pair_of = [&](int m) { return pair_at(call.order, item.first + done + m); };
    float sum[4][token_tiles][4] = {};
    multiply_part<T, bits, token_tiles, Order::kOwn, groups, kept>(
        own, work, {tile, row_warp, work.chunks, work.row_warps, busy}, sum, [] { wait_for_earlier_kernels(); },
        [&](auto held) {
          return Inputs<T, token_tiles, Order::kOwn, decltype(held)::value>(
              own, work, memory, [&](int m) { return pair_of(m) / call.sharing; });
        });
    lay_down(own.M, sum, memory, own_bytes);
    __syncthreads();
    stored.store(own.M, pair_of);
    __syncthreads();  // the next pairs' sums lie there too
  }
#endif
}

}  // namespace qload::cuda
