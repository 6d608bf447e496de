// Products of 8-bit codes: rows divided among threads, and the kernel for any machine.
#include "codes.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "codes_block.h"
#include "kernels.h"
#include "parallel.h"

namespace qload::cpu {
namespace {

constexpr int64_t kCodeWork = 1 << 20;    // products for each thread, at least
constexpr int64_t kRowsInCache = 32;      // rows in the cache while all tokens are multiplied with them

struct CodesScalar {
  static constexpr int kStep = 16;
  struct Token {
    const int8_t* at;
  };
  using Row = Token;
  using Sums = int32_t;

  static Sums zero() { return 0; }
  static Token token(const int8_t* at) { return {at}; }
  static Row row(const int8_t* at) { return {at}; }
  static Sums plus(Sums sums, Token token, Row row) {
    for (int i = 0; i < kStep; ++i) sums += token.at[i] * row.at[i];
    return sums;
  }
  static int32_t across(Sums sums, int32_t) { return sums; }
};

}  // namespace

void code_dots_scalar(const CodeBlock& in, int tokens, int rows) { code_dots<CodesScalar>(in, tokens, rows); }

void multiply_codes(const Kernels& kernels, const int8_t* x, int64_t M, int64_t K, const int8_t* w, int64_t w_pitch,
                    int64_t N, int32_t* sums, int threads) {
  if (K >= kMostCodes) throw std::invalid_argument("an int32 does not hold sums of so many codes");
  std::vector<int32_t> of_tokens(static_cast<size_t>(M), 0);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k) of_tokens[static_cast<size_t>(m)] += x[m * K + k];
  // With few tokens memory is the limit, and rows in sequence are fastest to read.
  const int64_t together = M <= kCodesTogether ? 1 : kCodesTogether;
  const int64_t blocks = (N + kCodesTogether - 1) / kCodesTogether;
  const int64_t least = kCodeWork / std::max<int64_t>(1, M * K * kCodesTogether) + 1;
  parallel_for(blocks, least, threads, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(N, end * kCodesTogether);
    for (int64_t first = begin * kCodesTogether; first < last; first += kRowsInCache)
      for (int64_t m = 0; m < M; m += kCodesTogether)
        for (int64_t n = first; n < std::min(last, first + kRowsInCache); n += together) {
          const CodeBlock block{x + m * K, K, of_tokens.data() + m, w + n * w_pitch, w_pitch, K, sums + m * N + n, N};
          kernels.code_dots(block, static_cast<int>(std::min<int64_t>(kCodesTogether, M - m)),
                            static_cast<int>(std::min<int64_t>(together, N - n)));
        }
  });
}

}  // namespace qload::cpu
