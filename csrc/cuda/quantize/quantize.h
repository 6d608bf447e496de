// Inputs as codes, and sums of codes as results; see quantize.cuh and scaled.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../shared/float.h"

namespace qload::cuda {

/// How a scale follows from the largest input a that it covers; qload/kernels/activations.py has the owners.
enum class Finding : int {
  kLargest,     // a / most
  kInverse,     // fbgemm: 1 / (most / a), and x is multiplied by most / a
  kInverseOne,  // modelopt: the same, 1 where a is nearly 0
  kPowersNear,  // a power of two, compressed-tensors': the nearer
  kPowersUp,    // a power of two, all others': none too small
  kAsymmetric,  // (max - min) / most, and a zero point
  kStored,      // found beforehand
  kE4m3Over,    // compressed-tensors: e4m3(a / most * stored), a code of 1 stands for that / stored
  kE4m3Times    // modelopt: e4m3(a / (most * stored)), a code of 1 stands for that * stored
};

/// What becomes of codes: e4m3 or int8 as they are; the codes less their zero points as floats; what they stand for; as
/// they are, of 32 neighbours in the order of many/w8a8.cuh, and zeros up to the next multiple of 32.
enum class Becoming : int { kCodes, kCounted, kMeant, kPermuted };

/// Types of stored scales and zero points: those of Float, and int8.
enum class Stored : int { kFloat32, kFloat16, kBfloat16, kInt8 };

struct Quantizing {
  const void* x;
  Float type;
  int64_t M, K, pitch;  // pitch: elements from one token to the next
  Finding finding;
  int size;       // inputs of one token that share a scale, or 0: all of them, or those of all tokens
  bool all;       // those of all tokens
  bool whole;     // codes are whole numbers, of so many bits
  int bits;
  float one_over_most;  // rounded
  float most;     // by which the largest input is divided; of floats, e4m3 or with 4 bits e2m1, their largest code too
  bool bounded;   // scales look at inputs up to `bound`
  float bound;
  const void* scale;  // kStored, kE4m3Times: one; kE4m3Over: one, or null for 1; and its zero point, or null
  const void* zero;
  Stored scale_type, zero_type;
  bool scale_each;    // `scale` is fp32 (M,), one of each token
  Becoming becoming;
  Float made;      // kCounted, kMeant: their type
  int64_t rows;    // of kCodes: all that are written, from M on zeros, but ones in row M where `ones`
  bool ones;
  void* codes;     // (rows, K)
  bool each;       // steps are of each token, though all share one
  float* steps;    // (M, groups) or one: what a code of 1 stands for; null
  float* zeros;    // alike, or null
  float* powers;   // kMeant: (M,), by which what codes stand for was divided
  uint32_t* largest;  // scratch where `all` and M > 1: (2, M)
};

/// cudaErrorNotSupported: sizes that no turn of eight inputs fits. On Hopper the next kernel may start early.
cudaError_t quantize(const Quantizing& work, cudaStream_t stream);

struct Scaling {
  const void* sums;  // (M, N) fp32, or int32; with zero points one row more: what each takes off
  bool whole;        // int32
  int64_t M, N;
  const float* row;     // (M,) or one
  bool row_each;
  const float* column;  // (N,), one, or null
  bool column_each;
  const float* zeros;   // (M,) or one, or null
  bool zero_each;
  const void* bias;     // (N,) or null
  Float bias_type;
  void* y;
  Float type;
  int64_t pitch;  // elements from one row of y to the next
};

/// y = rounded((sums - zeros * the last row) * row * column + bias). cudaErrorNotSupported: N no multiple of 4.
cudaError_t scale_sums(const Scaling& work, cudaStream_t stream);

}  // namespace qload::cuda
