// Codes that lie row by row in bytes, eight at a time, to rows of floats.
//
//   out[n, k] = round((value(code[n, k]) - zero[n, k]) * scale[n, k] * factor * factors[k])
//
//   in   codes    kUnsigned, kSigned: a byte each, the number that it is; kLooked: a byte each, by `value_of`
//                 kPairs: two a byte, the first in its low bits; kPairsTurned: in its high bits
//                 kHalves: two a byte, of outputs 2i in its low and 2i + 1 in its high bits
//                 kSparse: the two of every four inputs that are kept, two a byte, the first in its low bits;
//                 all others have the code 8
//        places   of kSparse, a byte for eight inputs: two bits a kept code, which of its four inputs it is
//        meaning  scales fp32, fp16, bf16, e8m0; zero points int32, one for all, or none (meaning.h)
//   out  out      fp32, fp16, bf16  (N, K)
//
//   needs    K a multiple of 8; rows of codes and of `out` at multiples of what a lane loads and stores
//   grid     a warp takes 256 inputs of kRowsOfTurn outputs; blocks that hold a table take turns after turns
//
// A table has a copy for every lane, so that no two want the same bank. Memory is the limit: some 80 instructions
// for eight codes.
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
  int64_t pitch;  // bytes from one row of codes to the next
  const uint8_t* places;
  int64_t places_pitch;
};

constexpr int kRowsThreads = 256, kTogether = 8;

template <Source source>
struct Reading {
  static constexpr bool bytes = source == Source::kUnsigned || source == Source::kSigned || source == Source::kLooked;
  static constexpr int entries = source == Source::kLooked ? 256 : bytes ? 0 : 16;
  static constexpr int rows = source == Source::kLooked ? 2 : 4;  // of a turn
};

/// Eight codes of row n from input k on: bytes, or four bits each in `x`.
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

/// What eight codes stand for.
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

/// The group of inputs k to k + 7; -1: they have several.
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

template <class Out>
__device__ __forceinline__ void store_eight(const float (&values)[kTogether], Out* out) {
  alignas(16) Out made[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) round_to(values[i], made[i]);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof made / 16); ++i)
    reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(made)[i];
}

/// `column`: the group of all eight, or -1.
__device__ __forceinline__ void mean_eight(const Meaning& m, int64_t n, int64_t k, int64_t column,
                                           float (&values)[kTogether]) {
  const int64_t row = m.n_table == 0 && m.n_run == 1 ? n : group_of(m.n_table, m.n_run, n);
  Affine one{};
  if (column >= 0) one = {scale_at(m, row, column), static_cast<float>(zero_at(m, row, column))};
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (column < 0) {
      const int64_t own = column_of(m, k + i);
      one = {scale_at(m, row, own), static_cast<float>(zero_at(m, row, own))};
    }
    values[i] = meant(m, one, values[i]);
  }
  if (!m.factors) return;
  const float4* factors = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(m.factors) + k);
  const float4 a = __ldg(factors), b = __ldg(factors + 1);
  const float each[kTogether] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < kTogether; ++i) values[i] = __fmul_rn(values[i], each[i]);
}

template <class Out, Source source>
__global__ void __launch_bounds__(kRowsThreads)
dequantize_rows(const __grid_constant__ Meaning meaning, const __grid_constant__ Rows rows, Out* __restrict__ out) {
  using Read = Reading<source>;
  __shared__ float table[Read::entries ? Read::entries * 32 : 1];
  const int lane = threadIdx.x % 32, warps = kRowsThreads / 32;
  if constexpr (Read::entries > 0) {
    for (int code = threadIdx.x / 32; code < Read::entries; code += warps)
      table[code * 32 + lane] = value_of(meaning, code);
    __syncthreads();
  }
  const auto across = static_cast<uint32_t>((rows.K + 32 * kTogether - 1) / (32 * kTogether));
  const auto turns = across * static_cast<uint32_t>((rows.N + Read::rows - 1) / Read::rows);
  for (uint32_t turn = blockIdx.x * warps + threadIdx.x / 32; turn < turns; turn += gridDim.x * warps) {
    const int64_t n = int64_t{turn / across} * Read::rows, k = int64_t{turn % across} * 32 * kTogether + lane * kTogether;
    if (k >= rows.K) continue;
    uint2 codes[Read::rows];
#pragma unroll
    for (int r = 0; r < Read::rows; ++r)
      if (n + r < rows.N) codes[r] = codes_at<source>(rows, n + r, k);
    const int64_t column = column_of_eight(meaning, k);
#pragma unroll
    for (int r = 0; r < Read::rows; ++r) {
      if (n + r >= rows.N) break;
      float values[kTogether];
      values_of<source>(table, codes[r], lane, values);
      mean_eight(meaning, n + r, k, column, values);
      store_eight(values, out + (n + r) * rows.K + k);
    }
  }
}

}  // namespace qload::cuda
