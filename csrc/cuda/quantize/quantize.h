// Quantized inputs, and results from sums of codes; see quantize.cuh and scaled.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../shared/float.h"

namespace qload::cuda {

/// Rule for a scale from the largest input a of its range; qload/kernels/activations.py names the owner of each.
enum class Finding : int {
  kLargest,     // a / most
  kInverse,     // fbgemm: 1 / (most / a), and x is multiplied by most / a
  kInverseOne,  // modelopt: the same, but 1 if a is nearly 0
  kPowersNear,  // compressed-tensors: the nearest power of two
  kPowersUp,    // all others: the next power of two above
  kAsymmetric,  // (max - min) / most, and a zero point
  kStored,      // given beforehand
  kE4m3Over,    // compressed-tensors: e4m3(a / most * stored); a code of 1 means that / stored
  kE4m3Times    // modelopt: e4m3(a / (most * stored)); a code of 1 means that * stored
};

/// Form of the result: e4m3 or int8 codes; codes minus zero points as floats; dequantized values; codes with every 32
/// neighbours in the order of many/w8a8.cuh, and zeros up to the next multiple of 32.
enum class Becoming : int { kCodes, kCounted, kMeant, kPermuted };

/// Types of stored scales and zero points: those of Float, and int8.
enum class Stored : int { kFloat32, kFloat16, kBfloat16, kInt8 };

struct Quantizing {
  const void* x;
  Float type;
  int64_t M, K, pitch;  // pitch: elements between tokens
  Finding finding;
  int size;       // inputs of a token with one scale; 0: all of them, or those of all tokens
  bool all;       // one scale for all tokens
  bool whole;     // codes are integers of `bits` bits
  int bits;
  float one_over_most;  // rounded
  float most;     // divisor of the largest input; for e4m3 and 4-bit e2m1 also the largest code
  bool bounded;   // inputs are limited to `bound` for scales
  float bound;
  const void* scale;  // kStored, kE4m3Times: one; kE4m3Over: one, or null for 1
  const void* zero;
  Stored scale_type, zero_type;
  bool scale_each;    // `scale` is fp32 (M,), one per token
  Becoming becoming;
  Float made;      // kCounted, kMeant: type of the result
  int64_t rows;    // kCodes: number of rows to write; beyond M zeros, or ones in row M with `ones`
  bool ones;
  void* codes;     // (rows, K)
  bool each;       // one step per token, although all are equal
  float* steps;    // (M, groups) or one: the value of a code of 1; null
  float* zeros;    // in the same shape, or null
  float* powers;   // kMeant: (M,), divisor of dequantized values
  uint32_t* largest;  // scratch for `all` and M > 1: (2, M)
};

/// cudaErrorNotSupported: sizes that are not multiples of eight inputs. On Hopper the next kernel may start early.
cudaError_t quantize(const Quantizing& work, cudaStream_t stream);

struct Scaling {
  const void* sums;  // (M, N) fp32 or int32; with zero points one more row, which is subtracted times each zero
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
  int64_t pitch;  // elements between rows of y
};

/// y = rounded((sums - zeros * last row) * row * column + bias). cudaErrorNotSupported: N is not a multiple of 4.
cudaError_t scale_sums(const Scaling& work, cudaStream_t stream);

}  // namespace qload::cuda
