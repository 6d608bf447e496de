// x of a chunk of 128 rows as operands of 32 rows at a time. Each warp loads its own: no warp waits for another.
//
// For Marlin's order x goes through shared memory, with the next chunk in flight while one is used. In strips a lane has
// eight neighbouring rows and loads x directly; with more tokens, whose loads in flight exceed the registers, x goes
// through shared memory too.
#pragma once

#include "../device/number.cuh"
#include "../device/ptx.cuh"
#include "decode.h"
#include "division.h"
#include "stream.cuh"

namespace qload::cuda {

/// The input of a row; beyond the weight's inputs: none.
__device__ __forceinline__ int source_of(const Decode& call, int row) {
  return row >= call.K ? call.inputs : call.perm ? call.perm[row] : row;
}

/// Gather the chunk at `row` and call `put(token, row of the chunk, x)`; missing inputs are zeros.
template <class T, class Put>
__device__ __forceinline__ void gather(const Decode& call, int row, const Put& put) {
#pragma unroll 1
  for (int k = threadIdx.x % 32; k < kChunk; k += 32) {
    const int source = source_of(call, row + k);
    const bool none = source >= call.inputs;
#pragma unroll 1
    for (int m = 0; m < call.M; ++m)
      put(m, k, none ? narrow<T>(0) : static_cast<const T*>(call.x)[int64_t{m} * call.inputs + source]);
  }
}

/// The same into tokens `pitch` apart.
template <class T>
__device__ __forceinline__ void gather(const Decode& call, int row, T* to, int pitch) {
  gather<T>(call, row, [&](int m, int k, T x) { to[m * pitch + k] = x; });
}

/// `held`: steps in registers or in flight, of `kSteps`. `cut`: x without a permutation may have fewer inputs than the
/// weight has rows, in multiples of 8; the missing ones are zeros.
template <class T, int token_tiles, Order order, int held, bool cut = false>
class Inputs;

template <class T, int token_tiles, int held>
class Inputs<T, token_tiles, Order::kMarlin, held> {
 public:
  /// `shared`: the warp's buffer.
  __device__ __forceinline__ Inputs(const Decode& call, const Division& work, unsigned char* shared)
      : call_(call), work_(work), now_(reinterpret_cast<T*>(shared)), next_(now_ + kTokens * kPitch) {
    const int lane = threadIdx.x % 32;
    own_ = lane / 8 * 8 + lane % 8 * kPitch;
    last_ = own_ + (call.M - 1 - lane % 8) * kPitch;  // tokens beyond the last read any token's x
  }

  /// Start to load the next chunk, at `row`.
  __device__ __forceinline__ void start_load(int row) {
    const int lane = threadIdx.x % 32;
    const T* x = static_cast<const T*>(call_.x);
    if (work_.runs) {
#pragma unroll 1
      for (int i = lane; i < call_.M * (kChunk / 8); i += 32) {
        const int m = i / (kChunk / 8), k = i % (kChunk / 8) * 8;
        const bool none = row + k >= call_.inputs;
        copy_async(next_ + m * kPitch + k, none ? x : x + int64_t{m} * call_.inputs + row + k, none);
      }
    } else {
      gather(call_, row, next_, kPitch);
    }
  }
  __device__ __forceinline__ void advance(int row, int) { start_load(row); }
  __device__ __forceinline__ void load_step(int) {}

  /// Wait for the loads of `start_load`, and use that chunk.
  __device__ __forceinline__ void turn() {
    wait_for_copies();
    __syncwarp();
    T* used = now_;
    now_ = next_, next_ = used;
  }
  __device__ __forceinline__ void operands(int step, uint32_t (&to)[token_tiles][4]) {
#pragma unroll
    for (int m = 0; m < token_tiles; ++m) load_matrices(to[m], now_ + min(own_ + 8 * m * kPitch, last_) + step * 32);
  }

 private:
  static constexpr int kPitch = kChunk + 8, kTokens = 8 * token_tiles;
  const Decode& call_;
  const Division& work_;
  T *now_, *next_;
  int own_, last_;
};

template <class T, int token_tiles, int held, bool cut>
class Inputs<T, token_tiles, Order::kOwn, held, cut> {
 public:
  /// If x cannot be loaded directly, the warp first gathers a chunk in `shared`.
  __device__ __forceinline__ Inputs(const Decode& call, const Division& work, unsigned char* shared)
      : call_(call), runs_(work.runs), shared_(reinterpret_cast<T*>(shared)) {
    aim([](int m) { return m; });
  }

  /// `row_of(m)`: row of x for token m, if x is loaded directly.
  template <class RowOf>
  __device__ __forceinline__ void aim(const RowOf& row_of) {
    const T* x = runs_ ? static_cast<const T*>(call_.x) : shared_;
    const int lane = threadIdx.x % 32, pitch = runs_ ? call_.inputs : kPitch;
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile)  // tokens beyond the last read any token's x
      at_[tile] = x + int64_t{row_of(min(8 * tile + lane / 4, call_.M - 1))} * pitch + lane % 4 * 8;
  }

  __device__ __forceinline__ void start_load(int row) {
    if constexpr (cut) left_ = call_.inputs - row - threadIdx.x % 4 * 8;
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile) at_[tile] = opaque(at_[tile] + (runs_ ? row : 0));
    if (!runs_) fill(row);
#pragma unroll
    for (int step = 0; step < held; ++step) load(step);
  }
  /// Later loads are for the next chunk, at `row`, `rows` after this one.
  __device__ __forceinline__ void advance(int row, int rows) {
    if (!runs_) return fill(row);
    if constexpr (cut) left_ -= rows;
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile) at_[tile] = opaque(at_[tile] + rows);
  }
  /// Load the rows `held` steps ahead into the registers of this step, which are free now.
  __device__ __forceinline__ void load_step(int step) { load((step + held) % kSteps); }
  __device__ __forceinline__ void turn() {}
  __device__ __forceinline__ void operands(int step, uint32_t (&to)[token_tiles][4]) const {
#pragma unroll
    for (int m = 0; m < token_tiles; ++m) {
      const uint4& x = held_[step % held][m];
      to[m][0] = x.x, to[m][1] = x.y, to[m][2] = x.z, to[m][3] = x.w;
    }
  }

 private:
  static constexpr int kPitch = kChunk + 8;

  __device__ __forceinline__ void load(int step) {
#pragma unroll
    for (int tile = 0; tile < token_tiles; ++tile) {
      const auto* from = reinterpret_cast<const uint4*>(at_[tile] + step * 32);
      held_[step % held][tile] = !cut || step * 32 < left_ ? *from : uint4{};
    }
  }
  __device__ __forceinline__ void fill(int row) {
    __syncwarp();
    gather(call_, row, shared_, kPitch);
    __syncwarp();
  }

  const Decode& call_;
  bool runs_;
  T* shared_;
  const T* at_[token_tiles];
  int left_;  // inputs from the lane's first one in the chunk to the end
  uint4 held_[held][token_tiles];
};

/// Strips through shared memory: a lane's eight rows of a token are 16 bytes. Those of odd tokens are shifted by four
/// places, which avoids bank conflicts of eight lanes that read at once.
template <class T, int token_tiles>
class StagedInputs {
 public:
  /// `shared`: the warp's buffer.
  __device__ __forceinline__ StagedInputs(const Decode& call, const Division& work, unsigned char* shared)
      : call_(call), runs_(work.runs), shared_(shared), now_(shared_address(shared)), next_(now_ + kBytes) {
    const int lane = threadIdx.x % 32, token = lane / 4, moved = token % 2 * (4 * kPlace);
    even_ = token * kTokenBytes + lane % 4 * kPlace + moved, odd_ = even_ - 2 * moved;
    to_ = place(lane / 16, lane % 16);
    from_ = opaque(static_cast<const T*>(call.x) + int64_t{lane / 16} * call.inputs + lane % 16 * 8);
  }

  /// Start to load the chunk at `row` into the older buffer. Tokens beyond the last have arbitrary values.
  __device__ __forceinline__ void start_load(int row) {
    if (!runs_) {
      T* to = reinterpret_cast<T*>(shared_ + (next_ - shared_address(shared_)));
      return gather<T>(call_, row, [&](int m, int k, T x) { to[place(m, k / 8) / 2 + k % 8] = x; });
    }
    const T* from = from_ + row;
    const int tokens = call_.M - threadIdx.x % 32 / 16;
#pragma unroll
    for (int m = 0; m < kTokens; m += 2) {
      if (m < tokens) copy_async_near(next_ + to_ + m * kTokenBytes, from);
      from += 2 * call_.inputs;
    }
  }

  /// Wait for the loads of `start_load`, and use that chunk.
  __device__ __forceinline__ void turn() {
    wait_for_copies();
    __syncwarp();
    const uint32_t used = now_;
    now_ = next_, next_ = used;
  }
  __device__ __forceinline__ void operands(int step, uint32_t (&to)[token_tiles][4]) const {
    const uint32_t from = now_ + (step % 2 ? odd_ : even_) + step * (4 * kPlace);
#pragma unroll
    for (int m = 0; m < token_tiles; ++m) load_shared(from + m * (8 * kTokenBytes), to[m]);
  }

 private:
  static constexpr int kPlace = 16, kTokens = 8 * token_tiles, kBytes = kTokens * kTokenBytes;  // bytes; also of a chunk

  static __device__ __forceinline__ int place(int token, int eight) {
    return token * kTokenBytes + (eight ^ token % 2 * 4) * kPlace;
  }

  const Decode& call_;
  bool runs_;
  unsigned char* shared_;
  uint32_t now_, next_;
  int even_, odd_, to_;
  const T* from_;
};

}  // namespace qload::cuda
