// Operands of a matrix product from words of Marlin's order.
//
// A word has rows 2t, 2t + 1, 2t + 8, 2t + 9 of columns c and c + 8, its nibbles numbered r h b from the highest
// bit: row 2t + 8h + r, column c + 8b. Nibbles i and i + 4 are the neighbouring rows of one register of the
// 16 x 16 operand whose rows are outputs: registers (h, b) = (0, 0), (0, 1), (1, 0), (1, 1).
#pragma once

#include <cstdint>
#include <cstring>

#include "number.cuh"

namespace qload::cuda {

/// Two codes of a word, plus an offset for bfloat16.
__device__ __forceinline__ uint32_t two_codes(uint32_t word, uint32_t magic) {
  return masked_or<0x000F000F>(word, magic);
}

/// Operand of one word: codes times a unit, or plus an offset, depending on T.
__device__ __forceinline__ void operand_of(uint32_t word, uint32_t magic, uint32_t (&to)[4]) {
  to[0] = two_codes(word, magic);
  to[1] = two_codes(word >> 8, magic);
  to[2] = two_codes(word >> 4, magic);
  to[3] = two_codes(word >> 12, magic);
}

/// Eight scales of a lane, columns c + 8b + 16j of a tile of 64, for one scale per column. Marlin stores them in another
/// order then: n = 32 a + 8 j + 2 t + r is at 32 a + 8 t + 2 j + r.
template <class T>
__device__ __forceinline__ uint4 scales_per_column(const T* tile, int c) {
  const T* from = tile + c / 2 * 8 + c % 2;
  T own[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i] = from[i / 4 * 32 + i % 4 * 2];
  uint4 scales;
  memcpy(&scales, own, sizeof scales);
  return scales;
}

}  // namespace qload::cuda
