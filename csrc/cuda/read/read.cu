// A kernel that only reads memory.
//
//   in   from   16-byte runs
//   grid     64 KB per block, 512 threads with eight 16-byte loads each, all in flight at once
#include "read.h"

#include "../device/ptx.cuh"

namespace qload::cuda {
namespace {

constexpr int kThreads = 512, kLoads = 8;

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* from, int64_t runs, uint32_t* sink) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kLoads + threadIdx.x;
  uint4 all[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = first + i * kThreads;
    all[i] = at < runs ? load_once(from + at) : uint4{};
  }
  uint32_t mixed = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) mixed ^= all[i].x + all[i].y * 3 + all[i].z * 5 + all[i].w * 7;
  if (mixed == 0x9E3779B9) *sink = mixed;
}

}  // namespace

cudaError_t read(const void* from, int64_t bytes, uint32_t* sink, cudaStream_t stream) {
  const int64_t runs = bytes / 16, each = kThreads * kLoads;
  if (runs == 0) return cudaSuccess;
  read_kernel<<<static_cast<unsigned>((runs + each - 1) / each), kThreads, 0, stream>>>(
      static_cast<const uint4*>(from), runs, sink);
  return cudaGetLastError();
}

}  // namespace qload::cuda
