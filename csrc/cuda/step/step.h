// Operations between the products of a decoder layer: norm.cuh, heads.cuh, gated.cuh, attend.cuh, route.cuh. On Hopper
// each kernel starts before the previous one ends, and waits for it before it reads anything but weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../experts/experts.h"

namespace qload::cuda {

/// y = norm(x + added) * weight, and the sum.
struct AddNorm {
  const void* x;       // fp16 or bf16 (rows, size)
  const void* added;   // as x; null: none
  const void* weight;  // as x (size,)
  void* sum;           // as x; null without `added`
  void* y;             // as x
  int rows, size;      // size a multiple of 8
  float eps;
  bool bfloat16;
};

/// Rotate queries and keys by their positions; store keys and values in a cache.
struct PlaceHeads {
  const void* heads;           // fp16 or bf16 (tokens, queries + 2 * kv, size): queries, keys, values
  const float *cos, *sin;      // (tokens, size / 2)
  const int64_t* slots;        // (tokens,) places of keys and values in the cache
  const void *q_norm, *k_norm; // as heads (size,), weights of norms before the rotation; null: none
  void* q;                     // as heads (tokens, queries, size)
  void *keys, *values;         // as heads (places, kv, size)
  int64_t places;
  int tokens, queries, kv, size;  // size a multiple of 16, at most 512
  float eps;
  bool pairs;                     // numbers 2 j and 2 j + 1 rotate together, not j and j + size / 2
  bool bfloat16;
};

/// Multiply up by the activated gate; both are side by side in a row.
struct GateRows {
  const void* x;  // fp16 or bf16 (rows, 2 * columns)
  void* y;        // as x (rows, columns)
  int rows, columns;  // columns a multiple of 8
  Gate gate;
  bool bfloat16;
};

/// Attention of one token of each sequence over the pages of a cache.
struct AttendPages {
  const void* q;                 // fp16 or bf16 (sequences, heads, k_size)
  const void *keys, *values;     // as q (pages, page_size, kv, k_pitch) and (pages, page_size, kv, v_pitch)
  const int64_t* positions;      // (sequences,) of the tokens: later keys are invisible
  const int64_t* table;          // (sequences, width) pages of a sequence in the order of its tokens
  const float* sinks;            // (heads,); null: none
  void* y;                       // as q (sequences, heads, v_size)
  int64_t pages;
  int page_size, width;
  int sequences, heads, kv;      // heads a multiple of kv
  int k_size, v_size, k_pitch, v_pitch;  // multiples of 8; sizes at most 256 and at most their pitches
  int window, chunk;             // maximal number of visible keys; size of a chunk of visible keys; 0: no such limit
  float scale;
  bool bfloat16;
};

/// Experts of each token, and their weights.
struct RouteTokens {
  const void* x;       // fp16 or bf16 (tokens, size)
  const void* weight;  // as x (experts, size)
  const void* bias;    // as x (experts,); null: none
  int64_t* ids;        // (tokens, top)
  float* weights;      // (tokens, top)
  int tokens, size, experts, top;  // size a multiple of 8; at most 1024 experts, and 32 of a token
  bool over_chosen;    // the softmax is over the chosen experts, not over all
  bool renormalized;   // weights are divided by their sum
  bool rounded;        // weights are rounded to x's type
  bool bfloat16;
};

/// cudaErrorNotSupported: no kernel for these arguments.
cudaError_t add_norm(const AddNorm& call, cudaStream_t stream);
cudaError_t place_heads(const PlaceHeads& call, cudaStream_t stream);
cudaError_t gate_pairs(const GateRows& call, cudaStream_t stream);
cudaError_t attend_pages(const AttendPages& call, cudaStream_t stream);
cudaError_t route_tokens(const RouteTokens& call, cudaStream_t stream);

}  // namespace qload::cuda
