// Codes as operands of matrix products, 32 rows of 64 columns at a time.
//
// An operand's registers are columns c and c + 8 (b) of two pairs of rows (h): of Marlin's order rows 2t, 2t + 1 and
// 2t + 8, 2t + 9 of 16; of our own rows 8t + 4p + 2h and the next of 32 (in operand p), words 2p + h. Codes stay
// unscaled: `kUnit` and `kOffset` say what a product with them is off by. Numbers are off by nothing.
#pragma once

#include <type_traits>

#include "../device/code.h"
#include "../device/exact.cuh"
#include "../device/ptx.cuh"
#include "../device/weights.cuh"
#include "division.h"

namespace qload::cuda {

/// Here numbers of 8 bits.
template <class T, Code code>
struct Codes {
  static constexpr bool kTiny = false;
  static constexpr float kUnit = 1;

  static __device__ __forceinline__ void pair(const uint32_t (&words)[4], int, uint32_t, uint32_t (&to)[2][4]) {
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int b = 0; b < 2; ++b) to[u / 2][u % 2 * 2 + b] = Exact<T, code>::of(words[u], b);
  }
};

// A code of 4 bits in the last bits of a half is 2**-24 of itself, and 16 bits as 2**-20. In a bfloat16 128 is added.
template <class T>
struct Codes<T, Code::kUint4> {
  static constexpr bool kTiny = Number<T>::kMagic == 0;
  static constexpr float kUnit = Number<T>::kUnit, kOffset = Number<T>::kOffset;
  static constexpr uint32_t kOnes = Number<T>::kOnes;

  /// Two operands of 16 rows of Marlin's order, nibbles r b h.
  static __device__ __forceinline__ void pair(const uint32_t (&words)[2][4], int j, uint32_t magic,
                                              uint32_t (&to)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) operand_of(words[i][j], magic, to[i]);
  }

  /// Of our own, nibbles r i b, those of i: two neighbouring rows in each of four words, b = 1 times 16 where codes
  /// are tiny.
  static __device__ __forceinline__ void pair(const uint32_t (&words)[4], int i, uint32_t magic, uint32_t (&to)[2][4]) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint32_t word = words[u] >> (8 * i);
      uint32_t* both = to[u / 2] + u % 2 * 2;
      if constexpr (kTiny)
        both[0] = word & 0x000F000F, both[1] = word & 0x00F000F0;
      else
        both[0] = two_codes(word, magic), both[1] = two_codes(word >> 4, magic);
    }
  }
};

// Codes of 8 bits: in Marlin's order a word for each b, bytes r h; in our own for each h, bytes r b.
template <class T>
struct Codes<T, Code::kUint8> {
  static constexpr bool kTiny = Number<T>::kMagic == 0;
  static constexpr float kUnit = Number<T>::kUnit, kOffset = kTiny ? 0 : -128;
  static constexpr uint32_t kOnes = Number<T>::kOnes;

  /// Two codes as T, of a bfloat16 beside an offset.
  static __device__ __forceinline__ uint32_t two(uint32_t word, int first) {
    if constexpr (kTiny) return word >> (8 * first) & 0x00FF00FF;
    return bytes_less_128(word, first, first + 2);
  }
  static __device__ __forceinline__ void pair(const uint32_t (&words)[4][4], int j, uint32_t, uint32_t (&to)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint32_t word = words[2 * i + j / 2][j % 2 * 2 + b];
        to[i][b] = two(word, 0), to[i][2 + b] = two(word, 1);
      }
  }
  static __device__ __forceinline__ void pair(const uint32_t (&words)[4], int, uint32_t, uint32_t (&to)[2][4]) {
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int b = 0; b < 2; ++b) to[u / 2][u % 2 * 2 + b] = two(words[u], b);
  }
};

/// The zero point of column c + 8b + 16j, of a lane's words in Marlin's order.
template <int bits>
__device__ __forceinline__ uint32_t zero_of(const uint32_t (&words)[bits / 4], int j, int b) {
  if constexpr (bits == 4) return words[0] >> (4 * (4 * b + j)) & 15;
  return words[j / 2 & (bits / 4 - 1)] >> (8 * (2 * b + j % 2)) & 255;
}

/// sum (+)= a * b; `fresh`: what was in sum is left out.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool fresh,
                                         T type) {
  if (fresh)
    multiply_first(sum, a, b0, b1, type);
  else
    multiply(sum, a, b0, b1, type);
}

/// Sums of x of a lane's tokens 2t, 2t + 1. In `sums` x was the first operand, one product for 32 rows instead of two:
/// a lane's registers are rows c and c + 8 there, all of token c, and every column is their sum.
template <int token_tiles>
__device__ __forceinline__ void sums_of_own(const float (&sums)[token_tiles][4], float (&own)[token_tiles][2]) {
#pragma unroll
  for (int m = 0; m < token_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) own[m][i] = __shfl_sync(~0u, sums[m][0] + sums[m][2], threadIdx.x % 4 * 8 + 4 * i);
}

template <class Sums>
__device__ __forceinline__ void clear(Sums& sums) {
  if constexpr (std::is_array_v<Sums>)
    for (auto& each : sums) clear(each);
  else
    sums = 0;
}

}  // namespace qload::cuda
