// x of a block, in shared memory, and how a launch divides a layer.
#pragma once

#include <cstdint>

#include "../device/division.h"
#include "../device/number.cuh"
#include "../device/ptx.cuh"
#include "w4a16.h"

namespace qload::cuda {

constexpr int kWarps = 8, kBlock = 32 * kWarps;
constexpr int kSteps = 8, kChunk = 16 * kSteps;  // rows

struct Work {  // how a launch divides a layer, the same for all blocks
  int columns_log;             // of tiles of a block
  int split;
  int chunks;                  // of K
  int phase_chunks;            // of x in shared memory at a time,
  int next_at;                 // and elements on, those that come next; 0: there is no room for both
  uint32_t ends;               // bit i: a group ends with step i of a chunk
  int group_step, chunk_step;  // to the next group inside of a chunk, and to that of a warp's next chunk
  int sums_at, received_at;    // bytes: where sums start in shared memory, and those of other blocks
};

/// Rows [first, first + rows) of all tokens, zeros where the layer has none.
template <class T>
__device__ __forceinline__ void stage(const W4A16& call, int first, int rows, int pitch, T* shared) {
  const T* x = static_cast<const T*>(call.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool runs = !call.perm && call.inputs % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  // Few tokens: several warps share the rows of one.
  const int share_log = call.M == 1 ? 3 : call.M == 2 ? 2 : call.M <= 4 ? 1 : 0;
  const int part = warp & ((1 << share_log) - 1), parts = 1 << share_log;
  for (int m = warp >> share_log; m < call.M; m += kWarps >> share_log) {
    const T* from = x + static_cast<int64_t>(m) * call.inputs;
    T* to = shared + m * pitch;
    if (runs) {
      for (int k = (part * 32 + lane) * 8; k < rows; k += parts * 256) {
        const bool none = first + k >= call.inputs;
        copy_async(to + k, none ? x : from + first + k, none);
      }
    } else {
      for (int k = part * 32 + lane; k < rows; k += parts * 32) {
        const int source = first + k >= call.K ? call.inputs : call.perm ? call.perm[first + k] : first + k;
        to[k] = source >= call.inputs ? narrow<T>(0) : from[source];
      }
    }
  }
}

}  // namespace qload::cuda
