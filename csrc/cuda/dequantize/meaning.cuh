// Value of a code: float32 products in the order of Codes.dequantize, each rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "meaning.h"

namespace qload::cuda {

__device__ __forceinline__ float read_float(uintptr_t from, int type, int64_t i) {
  if (type == static_cast<int>(Float::kFloat16)) return __half2float(reinterpret_cast<const __half*>(from)[i]);
  if (type == static_cast<int>(Float::kBfloat16))
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(from)[i]);
  return reinterpret_cast<const float*>(from)[i];
}

/// Position of group n in a kernel's order, which permutes the six lowest bits.
__device__ __forceinline__ int64_t placed(int64_t n, uint32_t places) {
  if (places == 0x543210) return n;
  int64_t moved = n & ~int64_t{63};
#pragma unroll
  for (int bit = 0; bit < 6; ++bit) moved |= (n >> bit & 1) << (places >> (4 * bit) & 15);
  return moved;
}

struct Affine {
  float scale, zero, offset = 0;
};

/// Field i of words with zero points.
__device__ __forceinline__ int field_at(const Meaning& m, int64_t i) {
  const int bits_log = 31 - __clz(m.zero_bits), per_word_log = 5 - bits_log;
  const uint32_t word = reinterpret_cast<const uint32_t*>(m.zeros)[i >> per_word_log] + m.zero_word;
  const int place = static_cast<int>(i) & ((1 << per_word_log) - 1);
  const int field = static_cast<int>(word >> (place << bits_log) & ((1u << m.zero_bits) - 1));
  return (field + m.zero_add) & m.zero_mask;
}

__device__ __forceinline__ int zero_at(const Meaning& m, int64_t n, int64_t k) {
  const int64_t i = placed(n, m.zero_places) * m.zero_n + k * m.zero_k;
  switch (static_cast<Zeros>(m.zeros_kind)) {
    case Zeros::kConstant:
      return m.zero;
    case Zeros::kInt32:
      return reinterpret_cast<const int32_t*>(m.zeros)[i];
    case Zeros::kWords:
      return field_at(m, i);
    default:
      return 0;
  }
}

__device__ __forceinline__ int64_t group_of(uintptr_t table, int64_t run, int64_t i) {
  if (table) return reinterpret_cast<const int32_t*>(table)[i];
  return static_cast<uint32_t>(i) / static_cast<uint32_t>(run);
}

__device__ __forceinline__ int64_t column_of(const Meaning& m, int64_t k) {
  return m.k_shift >= 0 ? k >> m.k_shift : group_of(m.k_table, m.k_run, k);
}

/// Position of the scale of a row and a column of groups.
__device__ __forceinline__ int64_t scale_of(const Meaning& m, int64_t row, int64_t column) {
  return placed(row, m.scale_places) * m.scale_n + column * m.scale_k;
}

/// Scale and zero point of output n, input k.
__device__ __forceinline__ Affine affine_at(const Meaning& m, int64_t n, int64_t k) {
  const int64_t row = m.n_table == 0 && m.n_run == 1 ? n : group_of(m.n_table, m.n_run, n);
  const int64_t column = column_of(m, k);
  const int64_t offset = placed(row, m.offset_places) * m.scale_n + column * m.scale_k;
  return {read_float(m.scales, m.scale_type, scale_of(m, row, column)), static_cast<float>(zero_at(m, row, column)),
          m.offsets ? read_float(m.offsets, m.scale_type, offset) : 0.0f};
}

__device__ __forceinline__ float meant(const Meaning& m, const Affine& affine, float value) {
  const float difference = __fsub_rn(value, affine.zero);
  const float scaled = m.divide ? __fdiv_rn(difference, affine.scale) : __fmul_rn(difference, affine.scale);
  const float whole = m.factor == 1 ? scaled : __fmul_rn(scaled, m.factor);
  return m.offsets ? __fsub_rn(whole, affine.offset) : whole;
}

/// 2**23 + code has the code in its last bits; `kBase` is 2**23 and `kBaseBits` are its bits.
constexpr uint32_t kBaseBits = 0x4B000000;
constexpr float kBase = 8388608.0f;

__device__ __forceinline__ void round_to(float value, float& out) { out = value; }
__device__ __forceinline__ void round_to(float value, __half& out) { out = __float2half_rn(value); }
__device__ __forceinline__ void round_to(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }

}  // namespace qload::cuda
