// Launches of w4a16.cuh: how a layer is divided, and the list of kernels.
#include "w4a16.h"

#include <algorithm>
#include <cstring>

#include "../device/launch.h"
#include "w4a16.cuh"

namespace qload::cuda {
namespace {

constexpr int kTwoBlocks = 110 << 10, kOneBlock = 220 << 10;  // shared memory, so that as many blocks fit

constexpr int kLongChunks = 32;  // of a block, for which an early start gains less than an even spread

using Kernel = void (*)(const W4A16, const Work);

template <class T, bool has_zeros, bool small>
Kernel of_tokens(int token_tiles) {
  switch (token_tiles) {
    case 1:
      return w4a16_kernel<T, 1, has_zeros, small>;
    case 2:
      return w4a16_kernel<T, 2, has_zeros, small>;
    case 4:
      return w4a16_kernel<T, 4, has_zeros, small>;
    default:
      return w4a16_kernel<T, 8, has_zeros, small>;
  }
}

template <class T>
Kernel kernel_of(int token_tiles, bool has_zeros, bool small) {
  if (has_zeros) return small ? of_tokens<T, true, true>(token_tiles) : of_tokens<T, true, false>(token_tiles);
  return small ? of_tokens<T, false, true>(token_tiles) : of_tokens<T, false, false>(token_tiles);
}

// What lies in shared memory: x, sums of the warps behind it if they fit, twice the sums that other blocks send.
bool lay_out(const W4A16& call, int token_tiles, int budget, Work& work, int& shared) {
  const int row_warps = kWarps >> work.columns_log;
  const int sums = kWarps * kTileN * (8 * token_tiles + 1) * 4;
  const int received = work.split > 1 ? 2 * (kTileN << work.columns_log) * call.M * 4 : 0;
  const int share = (work.chunks + work.split - 1) / work.split;
  const auto bytes_of = [&](int chunks) { return (call.M * (chunks * kChunk + 8) * 2 + 15) / 16 * 16; };
  const int room = budget - received;
  int most = 0;
  while (most < share && bytes_of(most + 1) <= room) ++most;
  const bool whole = most >= share;
  bool two = false;  // what comes next beside what is used, if that leaves every warp a chunk
  if (!whole) {
    const int single = most / row_warps * row_warps;
    for (most = 0; 2 * bytes_of(most + 1) <= room;) ++most;
    two = most >= row_warps;
    most = two ? most / row_warps * row_warps : single;
  }
  work.phase_chunks = whole ? share : most;
  work.next_at = two ? bytes_of(work.phase_chunks) / 2 : 0;
  const int inputs = bytes_of(work.phase_chunks) * (two ? 2 : 1);
  work.sums_at = inputs + sums + received <= budget ? inputs : 0;
  work.received_at = std::max(inputs, work.sums_at + sums);
  shared = work.received_at + received;
  return work.phase_chunks > 0 && shared <= budget;
}

// How many columns a block has at a time and how many blocks share them: the fewest columns with which two blocks
// that share K are all on the device at once, for then x is read by few and no block waits for a place; else as many
// columns as there are. Both were best, or within a few percent of it, on every shape of tests/bench/linear.py.
bool divide(const W4A16& call, const Device& device, int token_tiles, int budget, int slots, Work& work, int& shared,
            int& rows_of_grid) {
  const Work whole = work;
  bool found = false;
  const bool narrow = call.columns || token_tiles < 8 || call.N / kTileN % 2;  // many tokens want wide blocks
  for (int log = narrow ? 0 : 1; log <= 2; ++log) {
    const int columns = 1 << log, tile_groups = call.N / kTileN >> log;
    if (call.N / kTileN % columns || (call.columns && columns != call.columns)) continue;
    for (int split = call.split ? call.split : 2; split > 0; split = call.split ? 0 : split - 1) {
      if (split > 1 && (device.major < 9 || split > work.chunks || kTileN * columns * call.M % split)) continue;
      Work here = whole;
      here.columns_log = log, here.split = split;
      int bytes = 0;
      if (!lay_out(call, token_tiles, budget, here, bytes)) continue;
      const int places = std::max(1, slots / split), turns = (tile_groups + places - 1) / places;
      if (!found || split == 1 || turns == 1) {
        work = here, shared = bytes, rows_of_grid = (tile_groups + turns - 1) / turns;
        if (turns == 1 && (split > 1 || device.major < 9)) return true;
      }
      found = true;
    }
  }
  return found;
}

}  // namespace

cudaError_t w4a16(const W4A16& call, cudaStream_t stream) {
  if (call.M == 0 || call.outputs == 0) return cudaSuccess;
  if (call.M > kMostTokens || call.K % kTileN || call.N % kTileN) return cudaErrorNotSupported;
  const Device device = this_device();
  const int token_tiles = call.M <= 8 ? 1 : call.M <= 16 ? 2 : call.M <= 32 ? 4 : 8;
  const bool two = token_tiles <= 2;
  const int budget = std::min(two ? kTwoBlocks : kOneBlock, device.shared - 64);
  Work work{};
  work.chunks = (call.K + kChunk - 1) / kChunk;
  const bool per_column = call.group >= call.K;
  const int per_chunk = per_column ? 1 : std::max(1, kChunk / call.group);
  work.ends = per_chunk == 1 ? 0x80 : per_chunk == 2 ? 0x88 : 0xAA;
  int shared = 0, rows_of_grid = 0;
  if (!divide(call, device, token_tiles, budget, device.multiprocessors * (two ? 2 : 1), work, shared, rows_of_grid))
    return cudaErrorNotSupported;
  // One block a multiprocessor, if that is all there are: else those that come early may meet on a few.
  const bool alone = rows_of_grid * work.split <= device.multiprocessors;
  if (alone && two && (token_tiles == 2 || work.chunks >= kLongChunks * work.split))
    shared = std::max(shared, device.shared / 2 + 1024);
  const int row_warps = kWarps >> work.columns_log;
  work.group_step = per_column ? 0 : 1;
  work.chunk_step = per_column ? 0 : row_warps * per_chunk - (per_chunk - 1);

  const bool small = per_chunk > 1, zeros = call.zeros != nullptr;
  const Kernel kernel = call.bfloat16 ? kernel_of<__nv_bfloat16>(token_tiles, zeros, small)
                                      : kernel_of<__half>(token_tiles, zeros, small);
  const cudaError_t raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared - 64);
  if (raised != cudaSuccess) return raised;
  return launch(kernel, dim3(work.split, rows_of_grid), kBlock, shared, work.split, call.early && device.major >= 9,
                stream, call, work);
}

}  // namespace qload::cuda
