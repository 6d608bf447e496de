// Routed experts: sorting by expert, products for few tokens, and the steps around them.
//
// A pair is a token and one of its `top` choices: pair m * top + k. Results of a pair do not depend on other pairs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

constexpr int kMostExperts = 4096;
constexpr int kItemHead = 4;  // numbers of an item before its pairs

/// Routing of tokens to experts.
struct Choice {
  const void* ids;     // int32 or int64 (pairs,), the expert of each pair; an invalid number: on another rank
  const int32_t* map;  // (total,) index of each expert on this rank, -1: on another rank; null: its number
  bool wide;           // ids are int64
  int pairs, total;
  int experts;         // on this rank
};

/// The pairs of each expert, divided into items: up to `tokens` pairs of one expert, a multiple of 4.
struct Sort {
  Choice choice;
  int32_t* order;   // (pairs,) pairs by expert, then by number; -1 at the end for experts of other ranks; null
  int32_t* places;  // (pairs,) position of each pair in `order`; null: not needed
  void* items;      // int32 (most_items + 1, 4 + tokens): expert, first position in `order`, count, number of
                    // items; the pairs. Items after the last have a count of -1
  int tokens, most_items;
};

/// act(gate) * up.
struct Gate {
  int kind;  // 0: silu, 1: gelu, 2: gelu by tanh, 3: (up + 1) * gate * sigmoid(alpha * gate), both clamped
  float alpha, limit;
};

/// x times the stacked weights of experts in strips; with `gated`, gate and up of an expert are combined.
struct Experts {
  Choice choice;
  const void* x;         // fp16 or bf16 (rows, inputs); pair i takes row i / sharing
  const void* weights;   // int32 (experts, N / 64, K * bits * 2)
  const void* scales;    // as of decode.h, (experts, ...)
  const void* zeros;     // as in decode.h, (experts, ...)
  const void* bias;      // as x (experts, outputs), plain; null
  const float* factors;  // (pairs,), or one per row of x: factors of the sums before the bias; null: 1
  const void* items;     // of Sort, with the same `tokens`; null: each pair is an item
  void* y;               // with `gated` as x (pairs, pitch), outputs / 2 per row; else fp32 (pairs, outputs)
  int most_items, sharing, pitch;
  int inputs;            // at most K, a multiple of 8: length of rows of x
  int K, N, outputs;     // K a multiple of 128, N of 64, outputs at most N; with `gated` both are multiples of 128
  Code code;
  int group;             // as in decode.h
  int tokens;            // 8 or 16, of an item
  int columns, row_warps;  // tiles of 64 columns per block, with `gated` 2; warps that share K: they determine the bits of y
  bool bfloat16, gated;
  bool row_factors;      // `factors` are by row of x
  Gate gate;
  bool known;            // routing was complete when the previous kernel started
  bool early;            // may start before the previous kernel ends
};

/// Rows of x in the order of experts, and zeros: to[i, k] = factor[pair] * x[pair / sharing, perm[expert, k]].
struct Gather {
  Choice choice;
  const void* x;         // fp16 or bf16 (rows, inputs)
  const int32_t* perm;   // (experts, K); null: in order
  const float* factors;  // (pairs,); null: 1
  const int32_t* order;  // pair of row i; null: pair i
  void* to;              // as x (rows, K): rows without a pair are zero
  int rows, sharing;     // sharing 0: row i takes row i of x
  int inputs, K;
  bool bfloat16, early;
};

/// A value of each row's expert: to[i] = values[expert of row i's pair], 1 for rows without a pair.
struct Spread {
  Choice choice;
  const float* values[2];  // (experts,); null: ones
  const int32_t* order;    // as in Gather
  float* to;               // (2, rows)
  int rows;
  bool early;
};

/// Multiply up by the activated gate; both are side by side in a row.
struct Gated {
  Choice choice;
  const void* x;         // fp32, fp16 or bf16 (rows, 2 * columns)
  const int32_t* order;  // as in Gather; rows without a pair, and elements beyond `columns`, become 0
  void* y;               // fp16 or bf16 (rows, pitch)
  int rows, columns, pitch;
  bool bfloat16, in_fp32;
  Gate gate;
  bool early;
};

/// y[m] = sum over a token's choices of weight * x, in their order; experts of other ranks add nothing.
struct Combine {
  Choice choice;
  const void* x;          // fp32, fp16 or bf16 (pairs, columns)
  const float* weights;   // (pairs,); null: 1
  const int32_t* places;  // row of each pair; null: pair i has row i
  void* y;                // fp16 or bf16 (tokens, columns)
  int tokens, top, columns;
  bool bfloat16, in_fp32;
  bool early;
};

/// cudaErrorNotSupported: no kernel for these arguments.
cudaError_t sort_by_expert(const Sort& call, cudaStream_t stream);
cudaError_t multiply_experts(const Experts& call, cudaStream_t stream);
cudaError_t gather_rows(const Gather& call, cudaStream_t stream);
cudaError_t spread_values(const Spread& call, cudaStream_t stream);
cudaError_t gate_rows(const Gated& call, cudaStream_t stream);
cudaError_t combine_choices(const Combine& call, cudaStream_t stream);

}  // namespace qload::cuda
