// Launches of sum.cuh.
#include "sum.h"

#include <algorithm>

#include "../device/launch.h"
#include "sum.cuh"

namespace qload::cuda {
namespace {

constexpr int kSumThreads = 256;  // without a norm

template <class T, bool kLines>
auto sum_of(int eights, bool norm) {
  if (!norm) return eights == 1 ? sum_ranks_kernel<T, 1, kLines, false> : sum_ranks_kernel<T, kMostSumEights, kLines, false>;
  return eights == 1   ? sum_ranks_kernel<T, 1, kLines, true>
         : eights == 2 ? sum_ranks_kernel<T, 2, kLines, true>
                       : sum_ranks_kernel<T, kMostSumEights, kLines, true>;
}

template <class T>
auto sum_of(int eights, bool lines, bool norm) {
  return lines ? sum_of<T, true>(eights, norm) : sum_of<T, false>(eights, norm);
}

}  // namespace

cudaError_t sum_ranks(const SumRanks& call, cudaStream_t stream) {
  const int64_t count = call.size / 8, all = call.rows * count;
  if (all == 0) return cudaSuccess;
  if (call.size % 8 || static_cast<size_t>(all) * 16 > call.peers.message_bytes()) return cudaErrorNotSupported;
  const bool norm = call.weight != nullptr, lines = static_cast<size_t>(all) * 16 <= kLineBytes;
  int threads = kSumThreads, eights = all > threads * 2 * this_device().multiprocessors ? kMostSumEights : 1;
  if (norm) {
    if (count > 1024 * kMostSumEights) return cudaErrorNotSupported;
    threads = static_cast<int>(std::min<int64_t>(1024, (count + 31) / 32 * 32));
    eights = static_cast<int>((count + threads - 1) / threads);
  }
  const int row = norm ? static_cast<int>(count) : threads * eights;
  const int64_t blocks = (all + row - 1) / row;
  if (blocks > kMostBlocks) return cudaErrorNotSupported;
  const auto kernel = call.bfloat16 ? sum_of<__nv_bfloat16>(eights, lines, norm) : sum_of<__half>(eights, lines, norm);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), threads, 0, 1, this_device().major >= 9, stream, call, row,
                all);
}

}  // namespace qload::cuda
