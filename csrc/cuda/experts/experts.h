// Tokens through the experts that they chose: sorting by expert, products of few tokens, and what lies around them.
//
// A pair is a token and one of its `top` choices; pair m * top + k. What is computed of a pair does not depend on others.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

constexpr int kMostExperts = 4096;
constexpr int kItemHead = 4;  // numbers of an item before its pairs

/// Who chose what.
struct Choice {
  const void* ids;     // int32 or int64 (pairs,), the expert of each pair; any number that is none: elsewhere
  const int32_t* map;  // (total,) where among the experts that are here one is, -1: elsewhere; null: at its number
  bool wide;           // ids are int64
  int pairs, total;
  int experts;         // that are here
};

/// The pairs of each expert, and items of them: up to `tokens` pairs of one expert, a multiple of 4.
struct Sort {
  Choice choice;
  int32_t* order;   // (pairs,) pairs by expert, then by number; -1 at the end: of experts that are elsewhere; null
  int32_t* places;  // (pairs,) where in `order` a pair is; null: nobody asks
  void* items;      // int32 (most_items + 1, 4 + tokens): expert, first place of `order`, count, items in all; the
                    // pairs. Those behind the last have a count of -1
  int tokens, most_items;
};

/// act(gate) * up.
struct Gate {
  int kind;  // 0: silu, 1: gelu, 2: gelu by tanh, 3: (up + 1) * gate * sigmoid(alpha * gate), both clamped
  float alpha, limit;
};

/// x times the weights of the experts, stacked in our own order: of `gated` ones the gate and up of one expert become one.
struct Experts {
  Choice choice;
  const void* x;         // fp16 or bf16 (rows, inputs); pair i takes row i / sharing
  const void* weights;   // int32 (experts, N / 64, K * bits * 2)
  const void* scales;    // as of decode.h, (experts, ...)
  const void* zeros;     // likewise
  const void* bias;      // as x (experts, outputs), plain; null
  const float* factors;  // (pairs,) or one for each row of x: factors of the sums before the bias is added; null: 1
  const void* items;     // of Sort, of as many tokens; null: each pair is an item of its own
  void* y;               // as x (pairs, pitch) of gated ones, outputs / 2 of a row; else fp32 (pairs, outputs)
  int most_items, sharing, pitch;
  int inputs;            // at most K, a multiple of 8: rows of x
  int K, N, outputs;     // K a multiple of 128, N of 64, outputs at most N; of gated ones both are, of 128
  Code code;
  int group;             // as of decode.h
  int tokens;            // 8 or 16, of an item
  int columns, row_warps;  // tiles of 64 columns of a block, of gated ones 2; warps that share K: they decide the bits of y
  bool bfloat16, gated;
  bool row_factors;      // `factors` are of rows of x
  Gate gate;
  bool known;            // who chose what was known when the kernel ahead started
  bool early;            // may start before the kernel ahead ends
};

/// Rows of x in the order of the experts' rows, and zeros: to[i, k] = factor[pair] * x[pair / sharing, perm[expert, k]].
struct Gather {
  Choice choice;
  const void* x;         // fp16 or bf16 (rows, inputs)
  const int32_t* perm;   // (experts, K); null: in order
  const float* factors;  // (pairs,); null: 1
  const int32_t* order;  // the pair of row i; null: pair i
  void* to;              // as x (rows, K): rows that no pair has are zero
  int rows, sharing;     // sharing 0: row i takes row i of x
  int inputs, K;
  bool bfloat16, early;
};

/// Values of each row's expert: to[i] = values[expert of row i's pair], 1 for rows without a pair.
struct Spread {
  Choice choice;
  const float* values[2];  // (experts,); null: ones
  const int32_t* order;    // as of Gather
  float* to;               // (2, rows)
  int rows;
  bool early;
};

/// Gate and up of each row, side by side, become one.
struct Gated {
  Choice choice;
  const void* x;         // fp32, fp16 or bf16 (rows, 2 * columns)
  const int32_t* order;  // as of Gather; rows that no pair has, and what is behind `columns`, become 0
  void* y;               // fp16 or bf16 (rows, pitch)
  int rows, columns, pitch;
  bool bfloat16, in_fp32;
  Gate gate;
  bool early;
};

/// y[m] = the sum over a token's choices of weight * x, in their order; experts that are elsewhere add nothing.
struct Combine {
  Choice choice;
  const void* x;          // fp32, fp16 or bf16 (pairs, columns)
  const float* weights;   // (pairs,); null: 1
  const int32_t* places;  // the row of each pair; null: pair i has row i
  void* y;                // fp16 or bf16 (tokens, columns)
  int tokens, top, columns;
  bool bfloat16, in_fp32;
  bool early;
};

/// cudaErrorNotSupported: no kernel for this.
cudaError_t sort_by_expert(const Sort& call, cudaStream_t stream);
cudaError_t multiply_experts(const Experts& call, cudaStream_t stream);
cudaError_t gather_rows(const Gather& call, cudaStream_t stream);
cudaError_t spread_values(const Spread& call, cudaStream_t stream);
cudaError_t gate_rows(const Gated& call, cudaStream_t stream);
cudaError_t combine_choices(const Combine& call, cudaStream_t stream);

}  // namespace qload::cuda
