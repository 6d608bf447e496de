// Codes as operands of matrix products, 32 rows of 64 columns at a time.
//
// An operand's registers are columns c and c + 8 (b) of two pairs of rows (h). In Marlin's order these are rows 2t, 2t + 1
// and 2t + 8, 2t + 9 of 16; in strips, for operand p, rows 8t + 4p + 2h and the next of 32, in word 2p + h. Codes stay
// unscaled: a product with them is off by factor `kUnit` and by `kOffset`. Numbers are exact.
#pragma once

#include <type_traits>

#include "../device/code.h"
#include "../device/exact.cuh"
#include "../device/ptx.cuh"
#include "../device/weights.cuh"
#include "division.h"

namespace qload::cuda {

/// Numbers of 8 bits; integers are specializations.
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

// A code of 4 bits in the last bits of a half is 2**-24 of its value; 16 times a code is 2**-20. A bfloat16 adds 128.
template <class T>
struct Codes<T, Code::kUint4> {
  static constexpr bool kTiny = Number<T>::kMagic == 0;
  static constexpr float kUnit = Number<T>::kUnit, kOffset = Number<T>::kOffset;
  static constexpr uint32_t kOnes = Number<T>::kOnes;

  /// Two operands of 16 rows in Marlin's order, nibbles r b h.
  static __device__ __forceinline__ void pair(const uint32_t (&words)[2][4], int j, uint32_t magic,
                                              uint32_t (&to)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) operand_of(words[i][j], magic, to[i]);
  }

  /// The same in strips, nibbles r i b, for one i: two neighbouring rows in each of four words; b = 1 is 16 times too large
  /// if codes are tiny.
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

// Codes of 8 bits: in Marlin's order a word for each b, bytes r h; in strips a word for each h, bytes r b.
template <class T>
struct Codes<T, Code::kUint8> {
  static constexpr bool kTiny = Number<T>::kMagic == 0;
  static constexpr float kUnit = Number<T>::kUnit, kOffset = kTiny ? 0 : -128;
  static constexpr uint32_t kOnes = Number<T>::kOnes;

  /// Two codes as T; a bfloat16 has an offset.
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

/// Zero point of column c + 8b + 16j from a lane's words in Marlin's order.
template <int bits>
__device__ __forceinline__ uint32_t zero_of(const uint32_t (&words)[bits / 4], int j, int b) {
  if constexpr (bits == 4) return words[0] >> (4 * (4 * b + j)) & 15;
  return words[j / 2 & (bits / 4 - 1)] >> (8 * (2 * b + j % 2)) & 255;
}

/// sum += a * b, or sum = a * b if `fresh`.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool fresh,
                                         T type) {
  if (fresh)
    multiply_first(sum, a, b0, b1, type);
  else
    multiply(sum, a, b0, b1, type);
}

/// Sums of x for a lane's tokens 2t, 2t + 1. In `sums` x was the first operand, which takes one product for 32 rows
/// instead of two: a lane's registers are then rows c and c + 8, both of token c, and every column is their sum.
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
