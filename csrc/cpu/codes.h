// Exact sums of products of 8-bit codes.
//
//   sums[m, n] = sum over k of x[m, k] * w[n, k]
//
//   in   x     int8   (M, K)
//        w     int8   (N, K)   rows at any pitch
//   out  sums  int32  (M, N)
//
// K is below 2**16, so that an int32 holds every sum: nothing is rounded. The bits of a result depend neither on the
// instruction set nor on the number of threads.
#pragma once

#include <cstdint>

namespace qload::cpu {

struct Kernels;

constexpr int64_t kMostCodes = 1 << 16;  // exclusive bound of K
constexpr int kCodesTogether = 4;        // tokens, and rows, with sums in registers at once

struct CodeBlock {
  const int8_t* x;
  int64_t x_pitch;
  const int32_t* of_tokens;  // the sum of each token's codes
  const int8_t* w;
  int64_t w_pitch;
  int64_t K;
  int32_t* sums;
  int64_t pitch;
};

/// Sums of up to `kCodesTogether` tokens times up to as many rows.
using CodeDots = void (*)(const CodeBlock&, int tokens, int rows);

void code_dots_scalar(const CodeBlock&, int tokens, int rows);
#ifdef QLOAD_X86
void code_dots_avx2(const CodeBlock&, int tokens, int rows);
void code_dots_avx512(const CodeBlock&, int tokens, int rows);
void code_dots_vnni(const CodeBlock&, int tokens, int rows);
#endif

/// Multiplies all tokens with all rows; x is contiguous. Throws std::invalid_argument if an int32 may overflow.
void multiply_codes(const Kernels& kernels, const int8_t* x, int64_t M, int64_t K, const int8_t* w, int64_t w_pitch,
                    int64_t N, int32_t* sums, int threads);

}  // namespace qload::cpu
