// Codes of a table of 16 values, two per byte, in flat blocks over the weight.
//
//   out[e] = round(table[code[e]] * scales[e >> block_bits])
//
//   in   codes   four bits each, the first of two in the high bits of its byte
//        table   fp32 (16,)
//        scales  fp32
//   out  out     fp32, fp16, bf16
//
//   needs    blocks of 2**3 codes or more; codes start at a whole word, `out` at a multiple of 16 bytes
//   grid     2**10 words per block, 256 threads; a warp stores whole cache lines
//   Memory is the limit: about 45 instructions for a word of eight codes.
#pragma once

#include <cstdint>

#include "meaning.cuh"
#include "tiles.cuh"

namespace qload::cuda {

constexpr int kTableWords = 4, kTableCodes = 8;

/// Codes `first` to `first + count` of a word; the first of two codes is in the high bits of its byte.
template <class Out, int count>
__device__ __forceinline__ void look_up(const float* table, uint32_t word, int first, float scale,
                                        Out (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int at = (first + i) * 4 ^ 4;
    round_to(__fmul_rn(table[word >> at & 15], scale), values[i]);
  }
}

/// The last word, of `count` codes: it may be incomplete.
__device__ __forceinline__ uint32_t last_word(const uint32_t* codes, int64_t count) {
  uint32_t word = 0;
  for (int byte = 0; 2 * byte < count; ++byte)
    word |= uint32_t{reinterpret_cast<const uint8_t*>(codes)[byte]} << (8 * byte);
  return word;
}

template <class Out>
__global__ void __launch_bounds__(kThreads)
dequantize_table(const uint32_t* __restrict__ codes, const float* __restrict__ values,
                 const float* __restrict__ scales, int block_bits, int64_t count, Out* __restrict__ out) {
  __shared__ float table[16];
  constexpr int parts = sizeof(Out) * kTableCodes / 16, part_codes = kTableCodes / parts, words_of_a_turn = 32 / parts;
  const int lane = threadIdx.x % 32, part = lane % parts * part_codes;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kTableWords + threadIdx.x;
  uint32_t words[kTableWords];
  float found[kTableWords];
#pragma unroll
  for (int i = 0; i < kTableWords; ++i) {
    const int64_t word = first + i * kThreads, at = word * kTableCodes;
    words[i] = at + kTableCodes <= count ? __ldg(codes + word) : last_word(codes + word, count - at);
    found[i] = at < count ? __ldg(scales + (at >> block_bits)) : 0;
  }
  if (threadIdx.x < 16) table[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTableWords; ++i) {
#pragma unroll
    for (int turn = 0; turn < parts; ++turn) {  // neighbouring lanes store neighbouring parts, of another lane's word
      const int from = turn * words_of_a_turn + lane / parts;
      const uint32_t word = parts == 1 ? words[i] : __shfl_sync(~0u, words[i], from);
      const float scale = parts == 1 ? found[i] : __shfl_sync(~0u, found[i], from);
      const int64_t at = (first + i * kThreads - lane + from) * kTableCodes + part;
      alignas(16) Out made[part_codes];
      look_up(table, word, part, scale, made);
      if (at + part_codes <= count) {
        *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<const uint4*>(made);
        continue;
      }
#pragma unroll
      for (int e = 0; e < part_codes; ++e)
        if (at + e < count) out[at + e] = made[e];
    }
  }
}

}  // namespace qload::cuda
