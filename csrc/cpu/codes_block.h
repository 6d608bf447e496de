// Sums of a block of tokens and rows in registers, for any instruction set.
//
// Lanes are inputs. The instruction set `L` reads `kStep` codes of a row at once as `Row`, and of a token as `Token`;
// `plus` adds their products to `Sums`, and `across` adds up the lanes, with `of_token`, the sum of the token's codes.
#pragma once

#include <cstring>

#include "ahead.h"
#include "codes.h"

namespace qload::cpu {
namespace {

template <class L, int Tokens, int Rows>
void code_step(int64_t k, int64_t ahead, const int8_t* const* x, const int8_t* const* w,
               typename L::Sums (&sums)[Tokens][Rows]) {
  typename L::Row rows[Rows];
  for (int r = 0; r < Rows; ++r) {
    rows[r] = L::row(w[r] + k);
    if (Rows == 1) ask_ahead(w[r] + k, ahead);
  }
  for (int t = 0; t < Tokens; ++t) {
    const typename L::Token token = L::token(x[t] + k);
    for (int r = 0; r < Rows; ++r) sums[t][r] = L::plus(sums[t][r], token, rows[r]);
  }
}

template <class L, int Tokens, int Rows>
void code_block(const CodeBlock& in) {
  const int8_t *x[Tokens], *w[Rows];
  for (int t = 0; t < Tokens; ++t) x[t] = in.x + t * in.x_pitch;
  for (int r = 0; r < Rows; ++r) w[r] = in.w + r * in.w_pitch;
  typename L::Sums sums[Tokens][Rows];
  for (int t = 0; t < Tokens; ++t)
    for (int r = 0; r < Rows; ++r) sums[t][r] = L::zero();
  int64_t k = 0;
  for (; k + L::kStep <= in.K; k += L::kStep) code_step<L, Tokens, Rows>(k, Rows * in.w_pitch, x, w, sums);
  if (k < in.K) {  // the last codes, padded with zeros
    int8_t of_x[Tokens][L::kStep] = {}, of_w[Rows][L::kStep] = {};
    const size_t left = static_cast<size_t>(in.K - k);
    for (int t = 0; t < Tokens; ++t) x[t] = static_cast<int8_t*>(std::memcpy(of_x[t], x[t] + k, left));
    for (int r = 0; r < Rows; ++r) w[r] = static_cast<int8_t*>(std::memcpy(of_w[r], w[r] + k, left));
    code_step<L, Tokens, Rows>(0, 0, x, w, sums);
  }
  for (int t = 0; t < Tokens; ++t)
    for (int r = 0; r < Rows; ++r) in.sums[t * in.pitch + r] = L::across(sums[t][r], in.of_tokens[t]);
}

template <class L, int Rows>
void code_tokens(const CodeBlock& in, int tokens) {
  if (tokens == 1) return code_block<L, 1, Rows>(in);
  if (tokens == 2) return code_block<L, 2, Rows>(in);
  if (tokens == 3) return code_block<L, 3, Rows>(in);
  return code_block<L, 4, Rows>(in);
}

template <class L>
void code_dots(const CodeBlock& in, int tokens, int rows) {
  if (rows == kCodesTogether) return code_tokens<L, kCodesTogether>(in, tokens);
  CodeBlock one = in;
  for (int r = 0; r < rows; ++r, one.w += in.w_pitch, ++one.sums) code_tokens<L, 1>(one, tokens);
}

}  // namespace
}  // namespace qload::cpu
