// A lane's inputs of a step: kOwn consecutive ones of tokens 8m + lane / 4, 16 bytes at a time, from x in memory or from
// the warp's own shared memory, which has the inputs of a chunk in the order of rows.
#pragma once

#include "codes.cuh"
#include "division.h"
#include "exllama.h"

namespace qload::cuda::exl {

template <class T, int bits, int token_tiles>
class Inputs {
  using R = Rows<bits>;
  static constexpr int kRows = R::kRows;

 public:
/// Inputs of the chunk at `row`.
  __device__ __forceinline__ Inputs(const Exllama& call, bool runs, int first_token, int tokens, int row, float* shared)
      : call_(call), runs_(runs), tokens_(tokens), shared_(reinterpret_cast<T*>(shared)) {
    static_assert(kRows * sizeof(T) <= kSumPitch * sizeof(float), "where sums will lie");
    x_ = static_cast<const T*>(call.x) + int64_t{first_token} * call.K;
    place(x_ + row, call.K);
    if (!lies(row)) gather(row);
  }

/// Advance to the next chunk, whose first row is `row`.
  __device__ __forceinline__ void turn(int row) {
    if (!lies(row)) return gather(row);
#pragma unroll
    for (int m = 0; m < token_tiles; ++m) at_[m] = opaque(at_[m] + kRows);
  }

  __device__ __forceinline__ void read(int step, uint32_t (&to)[token_tiles][R::kPairs]) const {
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)
#pragma unroll
      for (int i = 0; i < R::kOwn / 8; ++i) {
        const uint4 eight = *reinterpret_cast<const uint4*>(at_[m] + step * R::kStep + 8 * i);
        to[m][4 * i] = eight.x, to[m][4 * i + 1] = eight.y, to[m][4 * i + 2] = eight.z, to[m][4 * i + 3] = eight.w;
      }
  }

 private:
  __device__ __forceinline__ bool lies(int row) const { return runs_ && row + kRows <= call_.K; }

  __device__ __forceinline__ void place(const T* chunk, int pitch) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < token_tiles; ++m)  // tokens beyond the last read its x; their sums are not stored
      at_[m] = opaque(chunk + int64_t{min(8 * m + lane / 4, tokens_ - 1)} * pitch + lane % 4 * R::kOwn);
  }

/// Store a chunk's inputs in the order of rows, with zeros beyond the last row.
  __device__ __forceinline__ void gather(int row) {
    constexpr int kEach = kRows / 32;
    int from[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = row + 32 * i + threadIdx.x % 32;
      from[i] = k >= call_.K ? -1 : call_.perm ? __ldg(call_.perm + k) : k;
    }
    __syncwarp();
#pragma unroll 1
    for (int m = 0; m < tokens_; ++m)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        shared_[m * kRows + 32 * i + threadIdx.x % 32] =
            from[i] < 0 ? narrow<T>(0) : x_[int64_t{m} * call_.K + from[i]];
    __syncwarp();
    place(shared_, kRows);
  }

  const Exllama& call_;
  bool runs_;
  int tokens_;
  const T* x_;
  T* shared_;
  const T* at_[token_tiles];
};

}  // namespace qload::cuda::exl
