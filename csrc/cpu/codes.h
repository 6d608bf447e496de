// Exact sums of products of codes of 8 bits.
//
//   sums[m, n] = sum over k of x[m, k] * w[n, k]
//
//   in   x     int8   (M, K)
//        w     int8   (N, K)   rows at any pitch
//   out  sums  int32  (M, N)
//
// K is below 2**16, so that an int32 holds every sum: nothing is rounded, and neither the instruction set nor the
// number of threads changes a bit.
#pragma once

#include <cstdint>

namespace qload::cpu {

struct Kernels;

constexpr int64_t kMostCodes = 1 << 16;  // of a row
constexpr int kCodesTogether = 4;        // tokens, and rows, whose sums are in registers at once

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

/// Up to `kCodesTogether` tokens times up to as many rows.
using CodeDots = void (*)(const CodeBlock&, int tokens, int rows);

void code_dots_scalar(const CodeBlock&, int tokens, int rows);
#ifdef QLOAD_X86
void code_dots_avx2(const CodeBlock&, int tokens, int rows);
void code_dots_avx512(const CodeBlock&, int tokens, int rows);
void code_dots_vnni(const CodeBlock&, int tokens, int rows);
#endif

/// The sums of all; x lies row after row. Throws std::invalid_argument where an int32 may not hold one.
void multiply_codes(const Kernels& kernels, const int8_t* x, int64_t M, int64_t K, const int8_t* w, int64_t w_pitch,
                    int64_t N, int32_t* sums, int threads);

}  // namespace qload::cpu
