// Operands of matrix products from codes in ExLlama's order.
//
// A lane has kOwn neighbouring rows of a column: kWords words of it, and kOwn consecutive inputs of each token. So the
// rows of a step are in the same lane as their inputs, without a shuffle. Pair q of a lane is rows 2q and 2q + 1: the
// order puts neighbours half a word apart. Codes of 8 bits are in GPTQ's order.
#pragma once

#include "../device/number.cuh"

namespace qload::cuda::exl {

template <int bits>
struct Rows {
  static constexpr int kOwn = bits == 3 ? 32 : bits == 2 ? 16 : 8;       // of a lane
  static constexpr int kStep = 4 * kOwn;                                 // of a warp
  static constexpr int kWords = kOwn * bits / 32, kPairs = kOwn / 2;     // of a lane and column
  static constexpr int kSteps = bits == 3 ? 1 : bits == 4 ? 4 : 2;       // of a chunk
  static constexpr int kRows = kSteps * kStep, kIndices = kStep / 32;    // of a chunk; of a step, and of a lane
};

template <int bits>
using Words = uint32_t[Rows<bits>::kWords][2][4];  // columns 4c ... 4c + 3 of each half of a tile

/// Two codes as T: times a unit, or plus an offset.
template <class T, int bits>
struct Codes {
  static constexpr float kUnit = Number<T>::kUnit, kOffset = Number<T>::kOffset;

  static __device__ __forceinline__ uint32_t pair(const Words<bits>& words, int half, int column, int q, uint32_t magic) {
    const auto word = [&](int i) { return words[i][half][column]; };
    if constexpr (bits == 3) {
      if (q == 15)
        return (word(0) >> 15 & 0x00010001) | (word(1) >> 14 & 0x00020002) | masked_or<0x00040004>(word(2) >> 13, magic);
      return two<7>(word(q / 5), 3 * (q % 5), magic);
    }
    return two<(1 << bits) - 1>(word(0), bits * q, magic);
  }

 private:
/// Two codes from bit `low` of each half of a word. In fp16 a position within ten bits needs no shift: an exact product
/// with a power of two corrects it, in another execution unit.
  template <uint32_t mask>
  static __device__ __forceinline__ uint32_t two(uint32_t word, int low, uint32_t magic) {
    constexpr int kRoom = bits == 3 ? 9 : 8;
    if constexpr (Number<T>::kMagic != 0) return masked_or<mask * 0x10001>(word >> low, magic);
    const int left = low % kRoom;
    const uint32_t codes = word >> (low - left) & mask * 0x10001 << left;
    return left == 0 ? codes : as<uint32_t>(__hmul2(as<__half2>(codes), __float2half2_rn(1.0f / (1 << left))));
  }
};

template <>
struct Codes<__half, 8> {
  static constexpr float kUnit = Number<__half>::kUnit, kOffset = 0;

  static __device__ __forceinline__ uint32_t pair(const Words<8>& words, int half, int column, int q, uint32_t) {
    return __byte_perm(words[q / 2][half][column], 0, q % 2 ? 0x4342 : 0x4140);
  }
};

template <>
struct Codes<__nv_bfloat16, 8> {
  static constexpr float kUnit = 1, kOffset = -128;

  static __device__ __forceinline__ uint32_t pair(const Words<8>& words, int half, int column, int q, uint32_t) {
    return bytes_less_128(words[q / 2][half][column], q % 2 * 2, q % 2 * 2 + 1);
  }
};

}  // namespace qload::cuda::exl
