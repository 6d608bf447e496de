// Packed codes to rows of floats, for every meaning and for few codes.
//
//   out[n, k] = round((value(code[n, k]) - zero[n, k]) * scale[n, k] * factor - offset[n, k])
//
//   in   codes   2, 4 or 8 bits in words, in any order with a plan
//        meaning scales fp32, fp16, bf16; zero points in words, int32, one for all, or none (meaning.h)
//   out  out     fp32, fp16, bf16  (N, K)
//
//   needs    K is a multiple of the codes of a word
//   grid     plan.blocks, 2**plan.thread_bits threads
//   A block reorders a tile of words as `out` (as in move.cuh). Then a thread takes words and looks up scale, zero
//   point and offset of each code; neighbouring threads have neighbouring outputs, whose scales are contiguous.
//   Instructions are the limit: the kernel is for few codes, for offsets, and for groups in any order.
#pragma once

#include "tiles.cuh"

namespace qload::cuda {

/// Offsets of scale and zero point of row n in all groups: computed once for a row.
struct Row {
  int64_t scale, zero;

  __device__ Row(const Meaning& m, uint32_t n)
      : scale(placed(n, m.scale_places) * m.scale_n), zero(placed(n, m.zero_places) * m.zero_n) {}

  template <Zeros zeros>
  __device__ Affine at(const Meaning& m, int64_t column) const {
    const float found = read_float(m.scales, m.scale_type, scale + column * m.scale_k);
    const int64_t place = zero + column * m.zero_k;
    if constexpr (zeros == Zeros::kWords) return {found, static_cast<float>(field_at(m, place))};
    if constexpr (zeros == Zeros::kInt32)
      return {found, static_cast<float>(reinterpret_cast<const int32_t*>(m.zeros)[place])};
    return {found, static_cast<float>(m.zero)};
  }
};

/// Values of a word with groups in any order: (code - zero) * scale.
template <class Out, int bits, Zeros zeros>
__device__ __forceinline__ void expand_groups(const Meaning& meaning, uint32_t word, Place at, Out* values) {
  const Row row(meaning, at.n);
  const int4* groups = reinterpret_cast<const int4*>(reinterpret_cast<const int32_t*>(meaning.k_table) + at.k);
#pragma unroll
  for (int four = 0; four < 8 / bits; ++four) {
    const int4 group = __ldg(groups + four);
    const int32_t columns[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Affine found = row.at<zeros>(meaning, columns[i]);
      const float code = static_cast<float>(word >> ((4 * four + i) * bits) & ((1u << bits) - 1));
      round_to(__fmul_rn(__fsub_rn(code, found.zero), found.scale), values[4 * four + i]);
    }
  }
}

template <class Out, int bits>
__device__ __forceinline__ void expand_word(const Meaning& meaning, const Tiles& tiles, uint32_t word, Place at,
                                            Out* __restrict__ out) {
  constexpr int codes = 32 / bits, runs = codes * sizeof(Out) / 16;
  const float* lookup = reinterpret_cast<const float*>(meaning.lookup);
  Out* to = out + int64_t{at.n} * tiles.pitch + at.k;
  alignas(16) Out values[codes];
  const auto zeros = static_cast<Zeros>(meaning.zeros_kind);
  if (tiles.grouped && zeros == Zeros::kWords) {
    expand_groups<Out, bits, Zeros::kWords>(meaning, word, at, values);
  } else if (tiles.grouped && zeros == Zeros::kInt32) {
    expand_groups<Out, bits, Zeros::kInt32>(meaning, word, at, values);
  } else if (tiles.grouped && zeros == Zeros::kConstant) {
    expand_groups<Out, bits, Zeros::kConstant>(meaning, word, at, values);
  } else {
#pragma unroll
    for (int i = 0; i < codes; ++i) {
      const uint32_t code = word >> (i * bits) & ((1u << bits) - 1);
      const float value = lookup ? lookup[code] : static_cast<float>(code);
      round_to(meant(meaning, affine_at(meaning, at.n, at.k + i), value), values[i]);
    }
  }
  if (runs && tiles.whole) {
#pragma unroll
    for (int i = 0; i < runs; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(values)[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < codes; ++i) to[i] = values[i];
}

template <class Out, int bits>
__global__ void __launch_bounds__(kThreads)
dequantize_any(const __grid_constant__ Plan plan, const __grid_constant__ Meaning meaning,
               const __grid_constant__ Tiles tiles, const uint32_t* __restrict__ codes, Out* __restrict__ out) {
  __shared__ uint32_t shared[kThreads << kMostTileRegisterBits];
  const Start start = start_of(plan, blockIdx.x);
  uint32_t words[kMostTileRegisters];
  load<kMostTileRegisterBits>(plan, codes + start.from + along(plan.from_thread, plan.thread_bits, threadIdx.x), words);
  settle<kMostTileRegisterBits>(plan, words);
  share<kMostTileRegisterBits, 0>(plan, words, shared);
  __syncthreads();
  const int places = 1 << (plan.thread_bits + plan.register_bits);
  for (int i = threadIdx.x; i < places; i += blockDim.x) {
    auto target = static_cast<uint32_t>(start.to);
    int place = 0;
    for (int bit = 0; i >> bit; ++bit) {
      if (!(i >> bit & 1)) continue;
      place |= 1 << tiles.bit[bit];
      target += plan.to_bit[tiles.bit[bit]];
    }
    expand_word<Out, bits>(meaning, tiles, shared[bank<0>(place)], place_of<bits>(tiles, target), out);
  }
}

}  // namespace qload::cuda
