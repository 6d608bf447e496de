// A lane's inputs of a step: kOwn consecutive ones of tokens 8m + lane / 4.
#pragma once

#include "codes.cuh"
#include "division.h"
#include "exllama.h"

namespace qload::cuda::exl {

template <class T, int bits, int token_tiles>
struct Inputs {
  static constexpr int kOwn = Rows<bits>::kOwn;

  const T* rows[token_tiles];  // of tokens that are not there any will do: nobody reads their sums

  __device__ __forceinline__ Inputs(const Exllama& call, int first, int tokens, int lane) {
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
      rows[m] = static_cast<const T*>(call.x) + int64_t{first + min(8 * m + lane / 4, tokens - 1)} * call.K;
  }

  /// Those of rows k ... k + kOwn - 1; zeros for rows that are not there.
  __device__ __forceinline__ void read(const Exllama& call, bool runs, int k, uint32_t (&to)[token_tiles][kOwn / 2]) const {
    if (runs) {
#pragma unroll
      for (int i = 0; i < kOwn / 8; ++i)
#pragma unroll
        for (int m = 0; m < token_tiles; ++m) {
          uint4 eight{};
          if (k + 8 * i < call.K) eight = *reinterpret_cast<const uint4*>(rows[m] + k + 8 * i);
          to[m][4 * i] = eight.x, to[m][4 * i + 1] = eight.y, to[m][4 * i + 2] = eight.z, to[m][4 * i + 3] = eight.w;
        }
      return;
    }
    const T none = narrow<T>(0);
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      int from[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = k + i + r;
        from[r] = row >= call.K ? -1 : call.perm ? __ldg(call.perm + row) : row;
      }
#pragma unroll
      for (int m = 0; m < token_tiles; ++m) {
        const T two[2] = {from[0] < 0 ? none : rows[m][from[0]], from[1] < 0 ? none : rows[m][from[1]]};
        memcpy(&to[m][i / 2], two, 4);
      }
    }
  }
};

}  // namespace qload::cuda::exl
