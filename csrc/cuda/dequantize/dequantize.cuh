// Packed codes to rows of floats.
//
//   out[n, k] = round((value(code[n, k]) - zero[n, k]) * scale[n, k] * factor)
//
//   in   codes   2, 4 or 8 bits, packed in any order that a plan moves; or one integer each, with strides
//        meaning scales fp32, fp16, bf16; zero points in words, int32, one for all, or none (meaning.h)
//   out  out     fp32, fp16, bf16  (N, K)
//
//   needs    of packed codes: K is a multiple of the codes of a word; a plan into rows of 2**row_bits codes, at
//            least a word each, fewer than 2**32 words
//   grid     plan.blocks, 2**plan.thread_bits threads; single codes: (K / 32, N / 32), 32 x 8 threads
//   a block brings a tile of words into the plain order (as move.cuh), then a thread takes words, or parts of
//   one, with scale and zero point from a table of the block where many words share them, and stores 16 bytes.
//   Memory is the limit: some 5 instructions a code.
//
// Equals Codes.dequantize (qload/spec/weight.py) rounded once to the type of `out`, bit for bit.
#pragma once

#include <cstdint>

#include "../device/tile.cuh"
#include "meaning.cuh"

namespace qload::cuda {

struct Rows {
  int64_t pitch;     // of `out`, in elements
  int row_bits;      // rows of the plan's target are 2**row_bits codes apart
  bool high_first;   // 4 bits: the first of two codes lies in the high bits of its byte
  bool whole;        // `out` and its rows start at multiples of 16 bytes
  int same;          // 2**same neighbouring places share scale and zero point
};

constexpr int kLeastSame = 2;  // for which a block makes a table of what its words share

template <class Out, int bits>
struct Part {  // of a word, that one thread expands
  static constexpr int per_word = 32 / bits;
  static constexpr int codes = per_word < 16 / static_cast<int>(sizeof(Out)) ? per_word : 16 / sizeof(Out);
  static constexpr int count_bits = per_word / codes == 1 ? 0 : per_word / codes == 2 ? 1 : 2;
};

template <int bytes>
struct Vector;
template <>
struct Vector<16> {
  using Type = uint4;
};
template <>
struct Vector<8> {
  using Type = uint2;
};

/// What a kernel leaves out: all that `kPlain` does is (code - zero) * scale, `kTable` is table[code] * scale. Both
/// need many words to share scale and zero point, and whole stores.
enum class Rule { kPlain, kTable, kGeneral };

struct Place {
  uint32_t n, k;
};

/// Row and column of a word, from its target in words.
template <int bits>
__device__ __forceinline__ Place place_of(const Rows& rows, uint32_t target) {
  constexpr int inside_log = bits == 8 ? 2 : bits == 4 ? 3 : 4;
  const int words_log = rows.row_bits - inside_log;
  return {target >> words_log, (target & ((1u << words_log) - 1)) << inside_log};
}

/// The sum of all strides of a place.
__device__ __forceinline__ uint32_t target_of(const Plan& plan, uint32_t start, int place) {
  for (int bit = 0; place >> bit; ++bit)
    if (place >> bit & 1) start += plan.to_bit[bit];
  return start;
}

/// The values of the codes in the low bits of `word`, which start at `at`.
template <class Out, int bits, Rule rule>
__device__ __forceinline__ void expand(const Meaning& meaning, const Rows& rows, const float* lookup, uint32_t word,
                                       Place at, float2 shared, Out* __restrict__ out) {
  constexpr int codes = Part<Out, bits>::codes;
  alignas(16) Out values[codes];
#pragma unroll
  for (int i = 0; i < codes; ++i) {
    const uint32_t code = word >> (i * bits) & ((1u << bits) - 1);
    float value;
    if constexpr (rule == Rule::kPlain) {  // both differences are exact
      value = __fmul_rn(__fsub_rn(__uint_as_float(kBaseBits | code), shared.y), shared.x);
    } else if constexpr (rule == Rule::kTable) {
      value = __fmul_rn(lookup[code], shared.x);
    } else {
      value = meant(meaning, affine_at(meaning, at.n, at.k + i), lookup ? lookup[code] : static_cast<float>(code));
    }
    round_to(value, values[i]);
  }
  Out* to = out + int64_t{at.n} * rows.pitch + at.k;
  using Whole = typename Vector<codes * sizeof(Out)>::Type;
  if (rule != Rule::kGeneral || rows.whole) {
    *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(values);
    return;
  }
#pragma unroll
  for (int i = 0; i < codes; ++i) to[i] = values[i];
}

/// The block's words, from shared memory to values.
template <class Out, int bits, int register_bits, Rule rule>
__device__ __forceinline__ void expand_all(const Plan& plan, const Meaning& meaning, const Rows& rows,
                                           const float* lookup, const uint32_t* shared, const float2* affine,
                                           uint32_t start, Out* __restrict__ out) {
  constexpr int part_bits = Part<Out, bits>::count_bits, parts = 1 << part_bits;
  const int thread = threadIdx.x, own_bits = plan.thread_bits - part_bits;
  const int places = 1 << (plan.thread_bits + plan.register_bits);
  const auto put = [&](int place, int part, uint32_t target) {
    const int inside = part * Part<Out, bits>::codes;
    Place at = place_of<bits>(rows, target);
    at.k += inside;
    const float2 scale_and_zero = rule == Rule::kGeneral ? float2{} : affine[place >> rows.same];
    expand<Out, bits, rule>(meaning, rows, lookup, shared[bank<0>(place)] >> (inside * bits), at, scale_and_zero, out);
  };
  if (own_bits < 0) {  // a matrix of a few words
    for (int i = thread; i < places * parts; i += 1 << plan.thread_bits)
      put(i / parts, i % parts, target_of(plan, start, i / parts));
    return;
  }
  const int part = thread & (parts - 1), first = thread >> part_bits;
  const uint32_t own = start + along(plan.to_bit, own_bits, first);
#pragma unroll 4
  for (int i = 0; i < 1 << (register_bits + part_bits); ++i) {
    const int place = first + (i << own_bits);
    if (place >= places) break;
    uint32_t target = own;
#pragma unroll
    for (int bit = 0; bit < register_bits + part_bits; ++bit)
      if (i >> bit & 1) target += plan.to_bit[own_bits + bit];
    put(place, part, target);
  }
}

/// What neighbouring places share: the scale, and the zero point plus what codes have more than themselves.
template <int bits>
__device__ __forceinline__ void fill(const Plan& plan, const Meaning& meaning, const Rows& rows, uint32_t start,
                                     float2* affine) {
  const int count = 1 << (plan.thread_bits + plan.register_bits - rows.same);
  for (int i = threadIdx.x; i < count; i += 1 << plan.thread_bits) {
    const Place at = place_of<bits>(rows, target_of(plan, start, i << rows.same));
    const Affine found = affine_at(meaning, at.n, at.k);
    affine[i] = float2{found.scale, found.zero + kBase};
  }
}

template <class Out, int bits, int register_bits, Rule rule>
__global__ void __launch_bounds__(kThreads)
dequantize_tiles(const __grid_constant__ Plan plan, const __grid_constant__ Meaning meaning,
                 const __grid_constant__ Rows rows, const uint32_t* __restrict__ codes, Out* __restrict__ out) {
  __shared__ uint32_t shared[kThreads << register_bits];
  __shared__ float table[1 << bits];
  __shared__ float2 affine[rule == Rule::kGeneral ? 1 : kThreads << register_bits >> kLeastSame];
  const Start start = start_of(plan, blockIdx.x);
  uint32_t words[1 << register_bits];
  load<register_bits>(plan, codes + start.from + along(plan.from_thread, plan.thread_bits, threadIdx.x), words);
  if constexpr (rule != Rule::kGeneral) fill<bits>(plan, meaning, rows, static_cast<uint32_t>(start.to), affine);
  if (rule != Rule::kPlain && meaning.lookup)
    for (int i = threadIdx.x; i < 1 << bits; i += 1 << plan.thread_bits)
      table[i] = reinterpret_cast<const float*>(meaning.lookup)[i];
  if (rows.high_first) {
#pragma unroll
    for (int i = 0; i < 1 << register_bits; ++i)
      words[i] = (words[i] & 0x0F0F0F0F) << 4 | (words[i] >> 4 & 0x0F0F0F0F);
  }
  settle<register_bits>(plan, words);
  share<register_bits, 0>(plan, words, shared);
  __syncthreads();
  expand_all<Out, bits, register_bits, rule>(plan, meaning, rows, meaning.lookup ? table : nullptr, shared, affine,
                                                  static_cast<uint32_t>(start.to), out);
}

constexpr int kTile = 32, kTileRows = 8;

struct Single {  // codes that lie one by one
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
