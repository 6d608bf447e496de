// Launches of exllama.cuh: the division of a layer, and the list of kernels.
#include "exllama.h"

#include <algorithm>

#include "../device/divide.h"
#include "exllama.cuh"

namespace qload::cuda {
namespace {

using namespace exl;

constexpr int kMostShared = 96 << 10;  // bytes of a block; the rest is L1, where warps share x
constexpr double kPerBlock = 0.12;     // cost of each further block of a cluster, relative to the time of a block

using Kernel = void (*)(const Exllama, const Shares);

template <class T, int bits>
Kernel of_tokens(int token_tiles) {
  return token_tiles == 1 ? exllama_kernel<T, bits, 1> : exllama_kernel<T, bits, 2>;
}

template <class T>
Kernel of_bits(int bits, int token_tiles) {
  switch (bits) {
    case 2:
      return of_tokens<T, 2>(token_tiles);
    case 3:
      return of_tokens<T, 3>(token_tiles);
    case 4:
      return of_tokens<T, 4>(token_tiles);
    case 8:
      return of_tokens<T, 8>(token_tiles);
    default:
      return nullptr;
  }
}

int rows_of_chunk(int bits) {
  return bits == 2 ? Rows<2>::kRows : bits == 3 ? Rows<3>::kRows : bits == 4 ? Rows<4>::kRows : Rows<8>::kRows;
}

using Plan = Divided<Shares>;

// The division with the least data for the busiest multiprocessor and with most of its possible warps. A wave of blocks
// costs the time of one more chunk; a further block of a cluster costs more than it saves if multiprocessors are idle.
bool divide(const Exllama& call, const Device& device, int token_tiles, int chunks, Plan& plan) {
  const int tiles = (call.N + kTileN - 1) / kTileN, most = most_warps(token_tiles), tokens = std::min(call.M, kTokens);
  const int token_blocks = (call.M + kTokens - 1) / kTokens;
  return cheapest(device, call.columns, call.split, most, plan, [&](Plan& here) -> double {
    Shares& work = here.work;
    here.warps = most / work.columns * work.columns;
    if (4 * here.warps < 3 * most && !call.columns) return 0;
    here.lay_out(tiles, tokens, 8 * token_tiles * kSumPitch * 4);
    if (here.shared > std::min(kMostShared, device.shared)) return 0;
    const int blocks = here.rows_of_grid * token_blocks, places = std::max(1, device.multiprocessors / work.split);
    const int sharers = work.split * work.row_warps, waves = (blocks + places - 1) / places;
    work.column_factor = (1 << 16) / work.columns + 1;
    work.share = chunks / sharers, work.rest = chunks % sharers;
    return waves * (work.share + (work.rest > 0) + 1) * here.warps * (1 + kPerBlock * (work.split - 1));
  });
}

}  // namespace

cudaError_t exllama(const Exllama& call, cudaStream_t stream) {
  if (call.M == 0 || call.N == 0) return cudaSuccess;
  const int token_tiles = call.M <= 8 ? 1 : 2;
  const Kernel kernel = call.bfloat16 ? of_bits<__nv_bfloat16>(call.bits, token_tiles) : of_bits<__half>(call.bits, token_tiles);
  if (!kernel || call.N % 4 || call.group < 1) return cudaErrorNotSupported;
  const Device device = this_device();
  const bool clusters = device.major >= 9;
  Plan plan{};
  const int rows = rows_of_chunk(call.bits), chunks = (call.K + rows - 1) / rows;
  plan.work.runs = !call.perm && call.K % 8 == 0 && reinterpret_cast<uintptr_t>(call.x) % 16 == 0;
  if (!divide(call, device, token_tiles, chunks, plan)) return cudaErrorNotSupported;

  const cudaError_t raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared);
  if (raised != cudaSuccess) return raised;
  const dim3 grid(plan.work.split, plan.rows_of_grid, (call.M + kTokens - 1) / kTokens);
  return launch(kernel, grid, 32 * plan.warps, plan.shared, plan.work.split, call.early && clusters, stream, call, plan.work);
}

}  // namespace qload::cuda
