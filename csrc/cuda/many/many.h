// x times a weight of 4 or 8 bits in our own order, best from 17 tokens on; see many.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../device/code.h"

namespace qload::cuda {

/// Which tiles of experts a launch takes: all; all but those of a last turn that leaves half of the multiprocessors free;
/// or those, each as two blocks of half the columns. The last two are launches of one product, one after the other.
enum class Turns : int { kAll, kWhole, kLast };

struct Many {
  const void* x;        // fp16 or bf16 (M, inputs), inputs a multiple of 8
  const void* weights;  // int32 (N / 64, K * bits * 2), our own order
  const void* scales;   // as x (G, N), Marlin's order; of numbers fp32, (N,) or one of each tile: (K / 128, N / 64);
                        // of scaled ones (K / 128, N * 128 / group) of layouts/strips.py
  const void* zeros;    // int32 (G, N * bits / 32), Marlin's order; null: all are 2**(bits - 1); of scaled numbers fp32 (N,), scales of columns;
                        // or offsets, as in decode.h
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
  bool coded;           // x is codes as w8a8.cuh has them: e4m3 or int8 as the weight's, K in multiples of 32
  int tokens, columns;  // of a block
  int teams;            // of warps, which take stages of K in turns and add up
  bool pairs;           // two blocks share K and add up,
  int slices;           // and slices of K those that know nothing of each other: a second kernel adds up
  bool neighbours;      // two blocks with neighbouring columns fetch x for each other; pairs only in a last turn that
                        // leaves half of the places free
  bool early;           // may start before the kernel ahead ends

  // Where experts are multiplied, each of whose rows follow each other: weights, scales, zeros and bias have one more
  // dimension, the first. x has M rows, `tokens` more than any item has; y gets those of items alone, in one slice.
  const int32_t* items;  // (most_items, 4 + tokens): expert, first row, count, and what nobody reads; null: no experts
  int experts, most_items;
  Turns turns;
};

/// cudaErrorNotSupported: no kernel for this. Pointers of x, weights, scales and zeros are multiples of 16.
cudaError_t many(const Many& call, cudaStream_t stream);

}  // namespace qload::cuda
