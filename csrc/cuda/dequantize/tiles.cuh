// Packed codes to rows of floats, one tile of words per block.
//
//   out[n, k] = round((code[n, k] - zero[n, k]) * scale[n, k])
//
//   in   codes   2, 4 or 8 bits in words, in any order with a plan
//        meaning scales fp32, fp16, bf16; zero points in words, one for all, or none (meaning.h)
//   out  out     fp32, fp16, bf16  (N, K), rows that start at multiples of 16 bytes
//
//   needs    a plan of 2**8 threads with 2**register_bits words each; four words or more share scale and zero point
//   grid     plan.blocks, 2**8 threads
//   A block reorders its words as `out` (as in move.cuh) and makes a table of scales and zero points that neighbouring
//   words share. Then a thread takes words, or parts of one, and stores 16 bytes of each.
//   Memory is the limit; a word takes about 50 instructions.
#pragma once

#include <cstdint>

#include "../device/ptx.cuh"
#include "../device/tile.cuh"
#include "meaning.cuh"
#include "packed.h"
#include "pairs.cuh"

namespace qload::cuda {

/// 16-bit arithmetic on pairs of codes, or float32.
enum class Arithmetic { kPairs, kFloat };

template <class Out, int bits>
struct Part {  // the part of a word for one thread
  static constexpr int per_word = 32 / bits;
  static constexpr int codes = per_word < 16 / static_cast<int>(sizeof(Out)) ? per_word : 16 / sizeof(Out);
  static constexpr int count_bits = per_word / codes == 1 ? 0 : per_word / codes == 2 ? 1 : 2;
  static constexpr int words = codes * sizeof(Out) / 4;  // stored words
};

struct Place {
  uint32_t n, k;
};

/// Row and column of a word, from its target in words.
template <int bits>
__device__ __forceinline__ Place place_of(const Tiles& tiles, uint32_t target) {
  constexpr int inside_log = bits == 8 ? 2 : bits == 4 ? 3 : 4;
  return {target >> tiles.row_words_bits, (target & ((1u << tiles.row_words_bits) - 1)) << inside_log};
}

template <class Out, Arithmetic arithmetic>
__device__ __forceinline__ uint2 shared_by(const Meaning& meaning, Place at) {
  const int64_t column = column_of(meaning, at.k), scale = scale_of(meaning, at.n, column);
  const int zero = zero_at(meaning, at.n, column);
  if constexpr (arithmetic == Arithmetic::kPairs) {
    const uint16_t bits = reinterpret_cast<const uint16_t*>(meaning.scales)[scale];
    return Pairs<Out>::shared(bits, meaning.scale_type == static_cast<int>(Float::kBfloat16), zero);
  } else {
    const float value = read_float(meaning.scales, meaning.scale_type, scale);
    return {__float_as_uint(value), __float_as_uint(static_cast<float>(zero) + kBase)};
  }
}

/// Fill the table of scales and zero points shared by neighbouring words.
template <class Out, int bits, int register_bits, Arithmetic arithmetic>
__device__ __forceinline__ void fill(const Plan& plan, const Meaning& meaning, const Tiles& tiles, uint32_t start,
                                     uint2* table) {
  constexpr int tile_bits = kThreadBits + register_bits;
  const int count = 1 << (tile_bits - tiles.same);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    uint32_t target = start;
#pragma unroll
    for (int bit = 0; bit < tile_bits - kLeastSame; ++bit)
      if (i >> bit & 1) target += plan.to_bit[tiles.same + bit];
    table[i] = shared_by<Out, arithmetic>(meaning, place_of<bits>(tiles, target));
  }
}

/// Values of the codes in one part of a word.
template <class Out, int bits>
__device__ __forceinline__ void by_pairs(uint32_t word, int part, uint2 shared, bool paired,
                                         uint32_t (&values)[Part<Out, bits>::words]) {
  const uint32_t base = Pairs<Out>::base, low = paired ? 0x3210 : 0x5410, high = paired ? 0x7654 : 0x7632;
  if constexpr (bits == 8) {
    values[0] = Pairs<Out>::values(__byte_perm(word, Pairs<Out>::base, 0x5150), shared);
    values[1] = Pairs<Out>::values(__byte_perm(word, Pairs<Out>::base, 0x5352), shared);
  } else {
    constexpr uint32_t mask = bits == 4 ? 0x000F000F : 0x00030003;
    if constexpr (bits == 2) word = __byte_perm(word, 0, part ? 0x4342 : 0x4140);  // four codes in each half
    uint32_t made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) made[i] = Pairs<Out>::values(masked_or<mask>(word >> (i * bits), base), shared);
    values[0] = __byte_perm(made[0], made[1], low), values[1] = __byte_perm(made[2], made[3], low);
    values[2] = __byte_perm(made[0], made[1], high), values[3] = __byte_perm(made[2], made[3], high);
  }
}

template <class Out, int bits>
__device__ __forceinline__ void by_floats(uint32_t word, int part, uint2 shared,
                                          uint32_t (&values)[Part<Out, bits>::words]) {
  constexpr int codes = Part<Out, bits>::codes;
  alignas(16) Out all[codes];
  word >>= part * codes * bits;
#pragma unroll
  for (int i = 0; i < codes; ++i) {  // both differences are exact
    const uint32_t code = word >> (i * bits) & ((1u << bits) - 1);
    const float difference = __fsub_rn(__uint_as_float(kBaseBits | code), __uint_as_float(shared.y));
    round_to(__fmul_rn(difference, __uint_as_float(shared.x)), all[i]);
  }
#pragma unroll
  for (int i = 0; i < Part<Out, bits>::words; ++i) values[i] = reinterpret_cast<const uint32_t*>(all)[i];
}

__device__ __forceinline__ void put(const uint32_t (&values)[4], char* to) {
  *reinterpret_cast<uint4*>(to) = uint4{values[0], values[1], values[2], values[3]};
}

__device__ __forceinline__ void put(const uint32_t (&values)[2], char* to) {
  *reinterpret_cast<uint2*>(to) = uint2{values[0], values[1]};
}

/// Reference at a distance in bytes.
template <class T>
__device__ __forceinline__ T& at(T* start, uint32_t bytes) {
  return *reinterpret_cast<T*>(reinterpret_cast<char*>(start) + bytes);
}

/// Expand the block's words from shared memory to values.
template <class Out, int bits, int register_bits, Arithmetic arithmetic>
__device__ __forceinline__ void expand(const Tiles& tiles, uint32_t* shared, const uint2* table, char* out) {
  constexpr int part_bits = Part<Out, bits>::count_bits, parts = 1 << part_bits;
  constexpr int own_bits = kThreadBits - part_bits;
  const int part = threadIdx.x & (parts - 1), first = threadIdx.x >> part_bits, apart = 1 << own_bits >> tiles.same;
  const uint32_t own = 4 * bank<0>(first);
  out += along(tiles.to_thread, own_bits, first) + part * static_cast<int>(sizeof(Out)) * Part<Out, bits>::codes;
  table += first >> tiles.same;
#pragma unroll 1
  for (int turn = 0; turn < parts; ++turn) {
    const uint32_t taken = own ^ tiles.take_part[turn];
    char* to = out + tiles.to_part[turn];
    const uint2* group = table + (turn << (own_bits + register_bits) >> tiles.same);
#pragma unroll
    for (int i = 0; i < 1 << register_bits; ++i, group += apart) {
      const uint32_t word = at(shared, taken ^ tiles.take[i]);
      uint32_t values[Part<Out, bits>::words];
      if constexpr (arithmetic == Arithmetic::kPairs)
        by_pairs<Out, bits>(word, part, *group, tiles.paired, values);
      else
        by_floats<Out, bits>(word, part, *group, values);
      put(values, to + tiles.to[i]);
    }
  }
}

template <class Out, int bits, int register_bits, Arithmetic arithmetic>
__global__ void __launch_bounds__(kThreads)
dequantize_tiles(const __grid_constant__ Plan plan, const __grid_constant__ Meaning meaning,
                 const __grid_constant__ Tiles tiles, const uint32_t* __restrict__ codes, Out* __restrict__ out) {
  extern __shared__ uint32_t shared[];  // words, then the table
  uint2* table = reinterpret_cast<uint2*>(shared + (kThreads << register_bits));
  const Start start = start_of(plan, blockIdx.x);
  wait_for_earlier_kernels();
  codes += start.from + along(plan.from_thread, kThreadBits, threadIdx.x);
  uint32_t words[1 << register_bits];
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i) words[i] = __ldg(codes + plan.from_register[i]);
  const auto target = static_cast<uint32_t>(start.to);
  fill<Out, bits, register_bits, arithmetic>(plan, meaning, tiles, target, table);
  settle<register_bits>(plan, words);
  const uint32_t own = 4 * bank<0>(along(plan.place_thread, kThreadBits, threadIdx.x));
#pragma unroll
  for (int i = 0; i < 1 << register_bits; ++i) at(shared, own ^ tiles.put[i]) = words[i];
  __syncthreads();
  const Place first = place_of<bits>(tiles, target);
  out += int64_t{first.n} * tiles.pitch + first.k;
  expand<Out, bits, register_bits, arithmetic>(tiles, shared, table, reinterpret_cast<char*>(out));
}

}  // namespace qload::cuda
