// x times the weights of chosen experts in strips, for few tokens per expert.
//
//   y[pair, n] = factor[pair] * sum over k of x[pair / sharing, k] * scale[e, g, n] * (code[e, k, n] - zero[e, g, n])
//                + bias[e, n]                       e: the pair's expert, g = k / group; numbers have no zero
//   with a gate: y[pair, n] = act(that of n) * that of n + outputs / 2
//
//   in   see experts.h
//   out  y    fp32 (pairs, outputs); with a gate fp16 or bf16 (pairs, pitch), rounded once
//
//   needs    K in multiples of 128, N of 64, with a gate of 128
//   grid     as many blocks as run at once, columns * row_warps warps
//   A block takes units in turns: an item and some tiles of its expert; with a gate, a tile of the gate and the tile of
//   up for the same columns. Warps work as in decode/decode.cuh. The first weights of a unit are loaded before the sums
//   of the previous one are stored, and its item one unit earlier. The rows of K of a warp depend on the layer alone, and
//   warps are added in order, so no other pair changes a bit of y. Memory is the limit.
//
// Equals x @ expert.dequantize().T (qload/kernel_formats/strips.py) up to the rounding of fp32 sums.
#pragma once

#include "../decode/decode.cuh"
#include "choice.cuh"
#include "gate.cuh"

namespace qload::cuda {

/// Registers of a thread: a multiprocessor runs two blocks of eight warps, or one for 16 tokens.
constexpr int most_registers(int token_tiles) { return token_tiles == 1 ? 128 : 168; }

/// An item in shared memory, as written by Sort.
template <int tokens>
struct __align__(16) Item {
  int expert, first, count, all;
  int pairs[tokens];
};

/// A unit: columns `unit % groups` of item `unit / groups`.
template <int tokens>
struct Units {
  using Own = Item<tokens>;

  const Experts& call;
  int groups;

  /// Number of blocks that take units, balanced to a difference of one; also the distance between units of a block.
  __device__ __forceinline__ int apart(int all_items) const {
    const int units = max(all_items * groups, 1), turns = (units + gridDim.x - 1) / gridDim.x;
    return (units + turns - 1) / turns;
  }

  /// Start to load the item of a unit; a count of -1: neither this item nor a later one exists.
  __device__ __forceinline__ void start_load(int unit, Own* to) const {
    constexpr int pieces = sizeof(Own) / 16;
    const int number = min(unit / groups, call.most_items);
    if (call.items) {
      if (threadIdx.x < pieces)
        copy_async(reinterpret_cast<int4*>(to) + threadIdx.x,
                   static_cast<const int4*>(call.items) + int64_t{number} * pieces + threadIdx.x, false);
    } else if (threadIdx.x == 0) {  // each pair is an item of its own
      const int expert = number < call.most_items ? expert_of(call.choice, number) : -1;
      to->expert = max(expert, 0), to->first = to->pairs[0] = number, to->all = call.most_items;
      to->count = number < call.most_items ? expert >= 0 : -1;
    }
  }
};

/// Arguments of `decode` for one expert; M is set later.
template <Code code>
__device__ __forceinline__ Decode of_expert(const Experts& call, int expert) {
  constexpr int bits = bits_of(code);
  const int64_t groups = call.group >= call.K ? 1 : call.K / call.group, N = call.N;
  const int64_t scales = is_scaled(code)      ? call.K / kChunk * N * column_scale_bytes(code, call.group)
                         : !is_number(code)   ? groups * N * 2
                         : call.group < call.K ? groups * (N / kTileN) * 4
                                               : N * 4;
  Decode own{};
  own.x = call.x;
  own.weights = static_cast<const unsigned char*>(call.weights) + expert * (N * call.K * bits / 8);
  own.scales = static_cast<const unsigned char*>(call.scales) + expert * scales;
  if (call.zeros)
    own.zeros = static_cast<const unsigned char*>(call.zeros) + expert * (is_scaled(code) ? N * 4 : groups * N * bits / 8);
  own.K = call.K, own.inputs = call.inputs, own.N = call.N, own.code = call.code, own.group = call.group, own.own = true;
  return own;
}

/// Store the sums of warps for `tokens` pairs.
template <class T>
struct Stored {
  const Experts& call;
  const Chunks& work;
  const unsigned char* memory;
  int warp_bytes;
  float unit;

  /// `group`: of the item's columns.
  template <class Own>
  __device__ __forceinline__ void store(const Own& item, int group) const {
    const int columns = call.gated ? 1 : work.columns, first = group * columns * kTileN;
    for (int i = threadIdx.x; i < columns * (kTileN / 4) * item.count; i += blockDim.x) {
      const int m = i / 16 / columns, tile = i / 16 - m * columns, n = first + tile * kTileN + i % 16 * 4;
      const unsigned char* at = memory + tile * warp_bytes + (m * kSumPitch + i % 16 * 4) * 4;
      const int pair = item.pairs[m];
      const int number = call.row_factors ? pair / call.sharing : pair;
      const float factor = call.factors ? __ldcg(call.factors + number) * unit : unit;
      if (call.gated)
        store_gated(at, item.expert, pair, n, factor);
      else
        store_plain(at, item.expert, pair, n, factor);
    }
  }

 private:
  __device__ __forceinline__ void store_gated(const unsigned char* at, int expert, int pair, int n, float factor) const {
    float a[4], b[4];
    values(at, expert, n, factor, a), values(at + warp_bytes, expert, call.outputs / 2 + n, factor, b);
    __align__(8) T made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) made[i] = narrow<T>(gated(call.gate, a[i], b[i]));
    *reinterpret_cast<uint2*>(static_cast<T*>(call.y) + int64_t{pair} * call.pitch + n) =
        *reinterpret_cast<const uint2*>(made);
  }
  __device__ __forceinline__ void store_plain(const unsigned char* at, int expert, int pair, int n, float factor) const {
    float own[4];
    values(at, expert, n, factor, own);
    float* to = static_cast<float*>(call.y) + int64_t{pair} * call.outputs + n;
    if (call.outputs % 4 == 0) {
      if (n < call.outputs) *reinterpret_cast<float4*>(to) = make_float4(own[0], own[1], own[2], own[3]);
    } else {
      for (int i = 0; i < 4; ++i)
        if (n + i < call.outputs) to[i] = own[i];
    }
  }
  /// Four columns of a token.
  __device__ __forceinline__ void values(const unsigned char* at, int expert, int n, float factor, float (&to)[4]) const {
    const float4 sums = of_warps(work, at, warp_bytes);
    to[0] = sums.x * factor, to[1] = sums.y * factor, to[2] = sums.z * factor, to[3] = sums.w * factor;
    if (!call.bias) return;
    const T* bias = static_cast<const T*>(call.bias) + int64_t{expert} * call.outputs + n;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (n + i < call.outputs) to[i] += wide(bias[i]);
  }
};

template <class T, Code code, int token_tiles, Groups groups>
__global__ void __maxnreg__(most_registers(token_tiles))
experts_kernel(const __grid_constant__ Experts call, const __grid_constant__ Chunks shape) {
#if __CUDA_ARCH__ >= 900  // grouped kernels run on no older chip
  constexpr bool numbers = groups == Groups::kTiles || groups == Groups::kScaled;
  constexpr int bits = bits_of(code), kept = token_tiles == 1 ? 8 : bits;
  constexpr int own_bytes = warp_bytes(8 * token_tiles, Order::kOwn, groups);
  constexpr int held = held_steps<bits, token_tiles, Order::kOwn, groups>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Item<8 * token_tiles> items[2];

  // The next kernel may read routing that was complete when this kernel waited: it starts after all blocks have.
  if (!call.known) wait_for_earlier_kernels();
  let_dependents_start();
  Chunks work = shape;
  work.runs = true;
  const int tiles = call.N / kTileN, columns = call.gated ? 1 : work.columns;
  const Units<8 * token_tiles> units{call, call.gated ? tiles / 2 : (tiles + columns - 1) / columns};
  const int warp = threadIdx.x / 32, row_warp = warp / work.columns, column = warp % work.columns;
  const int beside = call.gated ? column * (tiles / 2) : column;
  const Stored<T> stored{call, work, memory, own_bytes, Codes<T, code>::kUnit};

  int unit = blockIdx.x, now = 0;
  units.start_load(unit, items);
  wait_for_copies();
  __syncthreads();
  const int apart = units.apart(items[0].all);
  if (unit >= apart) return wait_for_earlier_kernels();  // the next kernel takes all earlier ones as complete
  units.start_load(unit + apart, items + 1);
  Decode own = of_expert<code>(call, items[0].expert);
  const auto tile_of = [&](int unit) { return unit % units.groups * columns + beside; };
  const auto is_busy = [&](int unit) { return items[now].count > 0 && tile_of(unit) < tiles && row_warp < work.chunks; };
  Words<bits, Order::kOwn, kept> stream(own, tile_of(unit), row_warp, work.row_warps);
  using OwnScales = ScalesOf<T, code, groups>;
  const int first_group = numbers ? row_warp : work.chunk_step ? row_warp * __popc(work.ends) : 0;
  OwnScales scales(own, tile_of(unit), first_group);
  Inputs<T, token_tiles, Order::kOwn, held, true> inputs(own, work, memory);
  const auto ask_weights = [&] {
    stream.load_first();
    if constexpr (numbers)
      scales.load_first(work.row_warps);
    else
      scales.template load_first<groups == Groups::kSmall>(work);
  };
  const auto ask_inputs = [&] {
    own.M = items[now].count;
    inputs.aim([&](int m) { return items[now].pairs[m] / call.sharing; });
    inputs.start_load(row_warp * kChunk);
  };
  bool busy = is_busy(unit);
  if (busy) ask_weights();
  wait_for_earlier_kernels();
  if (busy) ask_inputs();

#pragma unroll 1
  while (items[now].count >= 0) {
    float sum[4][token_tiles][4] = {};
    multiply_part<T, code, token_tiles, Order::kOwn, groups, kept>(
        own, work, {tile_of(unit), row_warp, work.chunks, work.row_warps, busy}, stream, scales, inputs, sum);
    if constexpr (numbers)
      if (busy) scales.leave(sum);
    store_sums(items[now].count, sum, memory, own_bytes);
    wait_for_copies();
    __syncthreads();
    const int before = unit;
    unit += apart, now ^= 1;
    busy = is_busy(unit);
    if (busy) {
      own = of_expert<code>(call, items[now].expert);
      stream = Words<bits, Order::kOwn, kept>(own, tile_of(unit), row_warp, work.row_warps);
      scales = OwnScales(own, tile_of(unit), first_group);
      ask_weights();
      ask_inputs();
    }
    stored.store(items[now ^ 1], before % units.groups);
    __syncthreads();  // the next sums use the same buffer
    units.start_load(unit + apart, items + (now ^ 1));
  }
#endif
}

using ExpertsKernel = void (*)(const Experts, const Chunks);

/// Kernel for integers; `small`: groups of 32 or 64.
template <class T>
ExpertsKernel integer_experts_of(const Experts& call, bool small);

/// Kernel for numbers with scaled sums; null for e5m2: no checkpoint has such experts.
template <class T>
ExpertsKernel number_experts_of(const Experts& call);

/// Kernel for numbers with scaled operands.
template <class T>
ExpertsKernel scaled_experts_of(const Experts& call);

}  // namespace qload::cuda
