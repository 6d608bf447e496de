// Codes in bytes, row by row, to rows of floats, eight at a time.
//
//   out[n, k] = round((value(code[n, k]) - zero[n, k]) * scale[n, k] * factor * factors[k])
//
//   in   codes    kUnsigned, kSigned: one byte each, an integer; kLooked: one byte each, through `value_of`
//                 kPairs: two per byte, the first in its low bits; kPairsTurned: the first in its high bits
//                 kHalves: two per byte, output 2i in its low and 2i + 1 in its high bits
//                 kSparse: the two stored codes of every four inputs, two per byte, the first in its low bits;
//                 the other two inputs have code 8
//        places   for kSparse, one byte for eight inputs: two bits per stored code, its position among four inputs
//        meaning  scales fp32, fp16, bf16, e8m0; zero points int32, one for all, or none (meaning.h)
//   out  out      fp32, fp16, bf16  (N, K)
//
//   needs    K a multiple of 8; rows of codes and of `out` aligned to a lane's loads and stores
//   grid     a warp takes 256 inputs of kRowsOfTurn outputs; blocks with a table in shared memory take several turns
//
// Each lane has its own copy of a table, which avoids bank conflicts. Memory is the limit: about 40 instructions for
// eight codes with one scale.
// Equals Codes.dequantize (qload/spec/weight.py) rounded once to the type of `out`, bit for bit.
#pragma once

#include <cstdint>

#include "meaning.cuh"
#include "values.cuh"

namespace qload::cuda {

enum class Source : int { kUnsigned, kSigned, kLooked, kPairs, kPairsTurned, kHalves, kSparse };

struct Rows {
  int64_t N, K;
  const uint8_t* codes;
  int64_t pitch;  // bytes between rows of codes
  const uint8_t* places;
  int64_t places_pitch;
};

constexpr int kRowsThreads = 256, kRowsBlocks = 5, kTogether = 8, kRowsOfTurn = 4;

template <Source source>
struct Reading {
  static constexpr bool bytes = source == Source::kUnsigned || source == Source::kSigned || source == Source::kLooked;
  static constexpr int entries = source == Source::kLooked ? 256 : bytes ? 0 : 16;
};

/// Eight codes of row n at input k: bytes, or four bits each in `x`.
template <Source source>
__device__ __forceinline__ uint2 codes_at(const Rows& rows, int64_t n, int64_t k) {
  if constexpr (Reading<source>::bytes) {
    uint2 both = __ldg(reinterpret_cast<const uint2*>(rows.codes + n * rows.pitch + k));
    if (source == Source::kSigned) both.x ^= 0x80808080, both.y ^= 0x80808080;
    return both;
  } else if constexpr (source == Source::kHalves) {
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(rows.codes + (n >> 1) * rows.pitch + k));
    const int shift = static_cast<int>(n & 1) * 4;
    const uint32_t low = both.x >> shift & 0x0F0F0F0F, high = both.y >> shift & 0x0F0F0F0F;
    const uint32_t first = low | low >> 4, second = high | high >> 4;  // bytes 0 and 2 have two codes each
    return {__byte_perm(first, second, 0x6420), 0};
  } else if constexpr (source == Source::kSparse) {
    const uint32_t kept = __ldg(reinterpret_cast<const uint16_t*>(rows.codes + n * rows.pitch + (k >> 2)));
    const uint32_t places = __ldg(rows.places + n * rows.places_pitch + (k >> 3));
    uint32_t word = 0x88888888;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * ((places >> (2 * i) & 3) + i / 2 * 4);
      word = (word & ~(15u << at)) | (kept >> (4 * i) & 15) << at;
    }
    return {word, 0};
  } else {
    const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(rows.codes + n * rows.pitch + (k >> 1)));
    if (source == Source::kPairs) return {word, 0};
    return {(word & 0x0F0F0F0F) << 4 | (word >> 4 & 0x0F0F0F0F), 0};
  }
}

/// Values of eight codes.
template <Source source>
__device__ __forceinline__ void values_of(const float* table, uint2 codes, int lane, float (&values)[kTogether]) {
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    if constexpr (Reading<source>::entries == 0) {
      const float raised = __uint_as_float(__byte_perm(word, kBaseBits, 0x7650 | i % 4));
      values[i] = raised - (source == Source::kSigned ? kBase + 128 : kBase);
    } else if constexpr (source == Source::kLooked) {
      values[i] = table[(word >> (8 * (i % 4)) & 255) * 32 + lane];
    } else {
      values[i] = table[(codes.x >> (4 * i) & 15) * 32 + lane];
    }
  }
}

/// Group of inputs k to k + 7; -1: they have several groups.
__device__ __forceinline__ int64_t column_of_eight(const Meaning& m, int64_t k) {
  if (!m.k_table) return m.k_run % kTogether == 0 ? column_of(m, k) : -1;
  const int4* groups = reinterpret_cast<const int4*>(reinterpret_cast<const int32_t*>(m.k_table) + k);
  const int4 a = __ldg(groups), b = __ldg(groups + 1);
  const int one = a.x;
  const bool all = one == a.y && one == a.z && one == a.w && one == b.x && one == b.y && one == b.z && one == b.w;
  return all ? one : -1;
}

__device__ __forceinline__ float scale_at(const Meaning& m, int64_t row, int64_t column) {
  const int64_t at = scale_of(m, row, column);
  if (m.scale_type == kE8m0) return of_e8m0(reinterpret_cast<const uint8_t*>(m.scales)[at]);
  return read_float(m.scales, m.scale_type, at);
}

/// Whether `scales_of_rows` and `zero_of_row` cover this kind of scales and zero points.
__device__ __forceinline__ bool is_plain(const Meaning& m) {
  return !m.divide && m.zeros_kind != static_cast<int>(Zeros::kWords) && m.scale_places == 0x543210 &&
         m.zero_places == 0x543210;
}

__device__ __forceinline__ int64_t row_of(const Meaning& m, int64_t n) {
  return m.n_table == 0 && m.n_run == 1 ? n : group_of(m.n_table, m.n_run, n);
}

/// Scales of outputs n, n + 1, ... in one column of groups; the last output's beyond it.
template <int count>
__device__ __forceinline__ void scales_of_rows(const Meaning& m, int64_t n, int64_t N, int64_t column,
                                               float (&scales)[count]) {
  const auto each = [&](auto read) {
#pragma unroll
    for (int r = 0; r < count; ++r) scales[r] = read(row_of(m, min(n + r, N - 1)) * m.scale_n + column * m.scale_k);
  };
  if (m.scale_type == static_cast<int>(Float::kFloat32))
    each([&](int64_t i) { return __ldg(reinterpret_cast<const float*>(m.scales) + i); });
  else if (m.scale_type == static_cast<int>(Float::kFloat16))
    each([&](int64_t i) { return __half2float(__ldg(reinterpret_cast<const __half*>(m.scales) + i)); });
  else if (m.scale_type == static_cast<int>(Float::kBfloat16))
    each([&](int64_t i) { return __bfloat162float(__ldg(reinterpret_cast<const __nv_bfloat16*>(m.scales) + i)); });
  else
    each([&](int64_t i) { return of_e8m0(__ldg(reinterpret_cast<const uint8_t*>(m.scales) + i)); });
}

__device__ __forceinline__ float zero_of_row(const Meaning& m, int64_t n, int64_t column) {
  if (m.zeros_kind != static_cast<int>(Zeros::kInt32)) return static_cast<float>(m.zero);
  const int64_t at = row_of(m, n) * m.zero_n + column * m.zero_k;
  return static_cast<float>(__ldg(reinterpret_cast<const int32_t*>(m.zeros) + at));
}

__device__ __forceinline__ uint32_t two_of(float first, float second, __half) {
  const __half2 both = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ uint32_t two_of(float first, float second, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <class Out>
__device__ __forceinline__ void store_eight(const float (&v)[kTogether], Out* out) {
  if constexpr (sizeof(Out) == 4) {
    reinterpret_cast<float4*>(out)[0] = {v[0], v[1], v[2], v[3]};
    reinterpret_cast<float4*>(out)[1] = {v[4], v[5], v[6], v[7]};
  } else {
    const Out type{};
    *reinterpret_cast<uint4*>(out) = {two_of(v[0], v[1], type), two_of(v[2], v[3], type), two_of(v[4], v[5], type),
                                      two_of(v[6], v[7], type)};
  }
}

/// Multiply results by the factors of their inputs, if present.
__device__ __forceinline__ void times_factors(const Meaning& m, int64_t k, float (&values)[kTogether]) {
  if (!m.factors) return;
  const float4* factors = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(m.factors) + k);
  const float4 a = __ldg(factors), b = __ldg(factors + 1);
  const float eight[kTogether] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < kTogether; ++i) values[i] = __fmul_rn(values[i], eight[i]);
}

/// Eight values of output n with one scale.
__device__ __forceinline__ void scale_eight(const Meaning& m, int64_t n, int64_t column, float scale,
                                           float (&values)[kTogether]) {
  if (m.zeros_kind != static_cast<int>(Zeros::kNone)) {
    const float zero = zero_of_row(m, n, column);
#pragma unroll
    for (float& value : values) value = __fsub_rn(value, zero);
  }
#pragma unroll
  for (float& value : values) value = __fmul_rn(value, scale);
  if (m.factor == 1) return;
#pragma unroll
  for (float& value : values) value = __fmul_rn(value, m.factor);
}

/// Eight values of output n with a lookup of scale and zero point for each.
__device__ __forceinline__ void scale_singly(const Meaning& m, int64_t n, int64_t k, float (&values)[kTogether]) {
  const int64_t row = row_of(m, n);
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int64_t column = column_of(m, k + i);
    const Affine one{scale_at(m, row, column), static_cast<float>(zero_at(m, row, column))};
    values[i] = meant(m, one, values[i]);
  }
}

template <class Out, Source source>
__global__ void __launch_bounds__(kRowsThreads, kRowsBlocks)
dequantize_rows(const __grid_constant__ Meaning meaning, const __grid_constant__ Rows rows, Out* __restrict__ out) {
  using Read = Reading<source>;
  __shared__ float table[Read::entries ? Read::entries * 32 : 1];
  const int lane = threadIdx.x % 32, warps = kRowsThreads / 32;
  if constexpr (Read::entries > 0) {
    for (int code = threadIdx.x / 32; code < Read::entries; code += warps)
      table[code * 32 + lane] = value_of(meaning, code);
    __syncthreads();
  }
  const bool plain = is_plain(meaning);
  const auto across = static_cast<uint32_t>((rows.K + 32 * kTogether - 1) / (32 * kTogether));
  const auto turns = across * static_cast<uint32_t>((rows.N + kRowsOfTurn - 1) / kRowsOfTurn);
  for (uint32_t turn = blockIdx.x * warps + threadIdx.x / 32; turn < turns; turn += gridDim.x * warps) {
    const uint32_t down = turn / across;
    const int64_t n = int64_t{down} * kRowsOfTurn, k = (turn - down * across) * 32 * kTogether + lane * kTogether;
    if (k >= rows.K) continue;
    Out* to = out + n * rows.K + k;
    float values[kTogether];
    const int64_t column = plain ? column_of_eight(meaning, k) : -1;
    if (column < 0) {  // slow path: eight inputs with several groups
#pragma unroll 1
      for (int64_t row = n; row < min(n + kRowsOfTurn, rows.N); ++row, to += rows.K) {
        values_of<source>(table, codes_at<source>(rows, row, k), lane, values);
        scale_singly(meaning, row, k, values);
        times_factors(meaning, k, values);
        store_eight(values, to);
      }
      continue;
    }
    uint2 codes[kRowsOfTurn];
#pragma unroll
    for (int r = 0; r < kRowsOfTurn; ++r) codes[r] = codes_at<source>(rows, min(n + r, rows.N - 1), k);
    float scales[kRowsOfTurn];
    scales_of_rows(meaning, n, rows.N, column, scales);
#pragma unroll
    for (int r = 0; r < kRowsOfTurn; ++r, to += rows.K) {
      if (n + r >= rows.N) break;
      values_of<source>(table, codes[r], lane, values);
      scale_eight(meaning, n + r, column, scales[r], values);
      times_factors(meaning, k, values);
      store_eight(values, to);
    }
  }
}

}  // namespace qload::cuda
