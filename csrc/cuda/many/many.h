// x times a weight of 4 or 8 bits in strips, best from 17 tokens on; see many.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

/// Tiles of experts in a launch: all; all but a last turn that would leave half of the multiprocessors idle; or that last
/// turn, with each tile as two blocks of half the columns. The last two are consecutive launches of one product.
enum class Turns : int { kAll, kWhole, kLast };

struct Many {
  const void* x;        // fp16 or bf16 (M, inputs), inputs a multiple of 8
  const void* weights;  // int32 (N / 64, K * bits * 2), strips
  const void* scales;   // as x (G, N), Marlin's order; of numbers fp32, (N,) or one of each tile: (K / 128, N / 64);
                        // of scaled ones (K / 128, N * 128 / group) of layouts/strips.py
  const void* zeros;    // int32 (G, N * bits / 32), Marlin's order; null: all are 2**(bits - 1);
                        // of scaled numbers fp32 (N,), scales of columns; or offsets, as in decode.h
  const void* bias;     // as x (outputs,), plain; null
  const float* token_scales;  // (M,), factors of the tokens' sums; null: 1
  void* y;              // as x (M, outputs)
  void* parts;          // fp32 (slices, M, N), written and read; null where there is one slice
  int M, K, N;          // K padded to 128, N to 64
  int inputs, outputs;  // at most K, N
  Code code;            // numbers have no zero points
  int group;            // 16 to 128 of scaled numbers; 32, 64, 128; K or more: one scale a column
  int offset_zero;      // as in decode.h, of 16 bits; not of experts
  bool bfloat16;
  bool coded;           // x has codes in the order of w8a8.cuh: e4m3 or int8 as the weight, K in multiples of 32
  int tokens, columns;  // of a block
  int teams;            // of warps; they take stages of K in turns and add their sums
  bool pairs;           // two blocks share K and add their sums
  int slices;           // independent slices of K; a second kernel adds their sums
  bool neighbours;      // two blocks with neighbouring columns fetch x for each other; pairs only in a last turn that
                        // leaves half of the places free
  bool early;           // may start before the previous kernel ends

  // For experts with contiguous rows each: weights, scales, zeros and bias have one more dimension, the first. x has M
  // rows, `tokens` more than all items; only rows of items in y are written, in one slice.
  const int32_t* items;  // (most_items, 4 + tokens): expert, first row, count, unused; null: no experts
  int experts, most_items;
  Turns turns;
};

/// cudaErrorNotSupported: no kernel for these arguments. Pointers of x, weights, scales and zeros are multiples of 16.
cudaError_t many(const Many& call, cudaStream_t stream);

}  // namespace qload::cuda
