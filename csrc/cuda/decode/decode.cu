// Launches of decode.cuh: the division of a layer, and the list of kernels.
#include "decode.h"

#include <algorithm>

#include "../device/divide.h"
#include "../device/launch_cache.h"
#include "decode.cuh"

namespace qload::cuda {
namespace {

using Kernel = void (*)(const Decode, const Chunks);

template <class T, Code code, int token_tiles, Order order, int kept>
Kernel kernel_of(Groups groups) {
  return groups == Groups::kSmall ? decode_kernel<T, code, token_tiles, order, Groups::kSmall, kept>
                                  : decode_kernel<T, code, token_tiles, order, Groups::kChunks, kept>;
}

// In strips half a chunk is in flight, or all of one if registers allow it and a warp has many chunks. With 4 bits and
// groups that end within a chunk they do not.
template <class T, Code code>
Kernel kernel_of(const Decode& call, int token_tiles, Groups groups, bool brief) {
  constexpr int bits = bits_of(code);
  if (groups == Groups::kLookedUp) return decode_kernel<T, code, 2, Order::kMarlin, Groups::kLookedUp, 4>;
  if (!call.own)
    return token_tiles == 1 ? kernel_of<T, code, 1, Order::kMarlin, 8>(groups)
                            : kernel_of<T, code, 2, Order::kMarlin, 4>(groups);
  if constexpr (code == Code::kUint4)
    if (groups == Groups::kSymmetric)
      return token_tiles == 2   ? decode_kernel<T, code, 2, Order::kOwn, Groups::kSymmetric, 4>
             : token_tiles == 3 ? decode_kernel<T, code, 3, Order::kOwn, Groups::kSymmetric, 4>
             : token_tiles == 4 ? decode_kernel<T, code, 4, Order::kOwn, Groups::kSymmetric, 8>
             : token_tiles == 5 ? decode_kernel<T, code, 5, Order::kOwn, Groups::kSymmetric, 8>
                                : decode_kernel<T, code, 6, Order::kOwn, Groups::kSymmetric, 8>;
  if (token_tiles == 3) return kernel_of<T, code, 3, Order::kOwn, 8>(groups);
  if (token_tiles == 2) return kernel_of<T, code, 2, Order::kOwn, bits>(groups);
  if (brief || groups == Groups::kSmall) return kernel_of<T, code, 1, Order::kOwn, bits>(groups);
  return decode_kernel<T, code, 1, Order::kOwn, Groups::kChunks, 8>;
}

template <class T, Code code>
Kernel kernel_of_numbers(int token_tiles) {
  return token_tiles == 1   ? decode_kernel<T, code, 1, Order::kOwn, Groups::kTiles, 8>
         : token_tiles == 2 ? decode_kernel<T, code, 2, Order::kOwn, Groups::kTiles, 8>
                            : decode_kernel<T, code, 3, Order::kOwn, Groups::kTiles, 8>;
}

template <class T, Code code>
Kernel kernel_of_scaled(int token_tiles) {
  constexpr int bits = bits_of(code);
  return token_tiles == 1   ? decode_kernel<T, code, 1, Order::kOwn, Groups::kScaled, 8>
         : token_tiles == 2 ? decode_kernel<T, code, 2, Order::kOwn, Groups::kScaled, bits>
                            : decode_kernel<T, code, 3, Order::kOwn, Groups::kScaled, bits>;
}

template <class T, Code code>
Kernel kernel_of_offsets(int token_tiles) {
  constexpr int bits = bits_of(code);
  return token_tiles == 1   ? decode_kernel<T, code, 1, Order::kOwn, Groups::kOffsets, bits>
         : token_tiles == 2 ? decode_kernel<T, code, 2, Order::kOwn, Groups::kOffsets, bits>
                            : decode_kernel<T, code, 3, Order::kOwn, Groups::kOffsets, 8>;
}

template <class T>
Kernel kernel_of(const Decode& call, int token_tiles, Groups groups, bool brief) {
  if (groups == Groups::kOffsets)
    return call.code == Code::kUint4 ? kernel_of_offsets<T, Code::kUint4>(token_tiles)
                                     : kernel_of_offsets<T, Code::kUint8>(token_tiles);
  switch (call.code) {
    case Code::kUint4: return kernel_of<T, Code::kUint4>(call, token_tiles, groups, brief);
    case Code::kUint8: return kernel_of<T, Code::kUint8>(call, token_tiles, groups, brief);
    case Code::kInt8: return kernel_of_numbers<T, Code::kInt8>(token_tiles);
    case Code::kE4m3: return kernel_of_numbers<T, Code::kE4m3>(token_tiles);
    case Code::kE5m2: return kernel_of_numbers<T, Code::kE5m2>(token_tiles);
    case Code::kMxfp8: return kernel_of_scaled<T, Code::kMxfp8>(token_tiles);
    case Code::kE2m1: return kernel_of_scaled<T, Code::kE2m1>(token_tiles);
    case Code::kNf4:
    case Code::kBnbFp4: return kernel_of_scaled<T, Code::kNf4>(token_tiles);
  }
  return nullptr;
}

bool is_symmetric(const Decode& call) {
  return call.own && call.code == Code::kUint4 && !call.zeros && !call.g_idx && call.group >= kChunk;
}

struct Plan : Divided<Chunks> {
  int turns;  // chunks of a warp
};

// Number of blocks that run at once, one per multiprocessor. Clusters do not fit every part of the chip.
int places(Kernel kernel, const Device& device, const Plan& plan) {
  const int split = plan.work.split;
  if (split == 1) return device.multiprocessors;
  static thread_local int known[9] = {};  // the chips of one host are alike
  if (known[split] == 0) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = split, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(split, device.multiprocessors), config.blockDim = dim3(32 * plan.warps);
    config.dynamicSmemBytes = plan.shared, config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      clusters = 1;
      cudaGetLastError();  // the error must not reach a later launch
    }
    known[split] = split * std::max(clusters, 1);
  }
  return known[split];
}

constexpr double kWave = 1.5;        // in chunks of a warp: a further wave of blocks has its own start and end
constexpr double kPerBlock = 0.125;  // cost of the sums of a cluster, for each of its blocks

// Find the division with the fewest consecutive chunks for a warp.
bool divide(const Decode& call, const Device& device, Kernel kernel, int token_tiles, Groups groups, Plan& plan) {
  const int tiles = call.N / kTileN, bytes = warp_bytes(8 * token_tiles, call.own ? Order::kOwn : Order::kMarlin, groups);
  return cheapest(device, call.columns, call.split, std::min(plan.warps, tiles), plan, [&](Plan& here) -> double {
    const int split = here.work.split;
    if (split > here.work.chunks) return 0;
    here.warps -= here.warps % here.work.columns;
    here.lay_out(tiles, call.M, bytes);
    if (here.shared > device.shared) return 0;
    here.shared = std::max(here.shared, device.shared / 2 + 1024);  // one block per multiprocessor
    const int blocks = here.rows_of_grid * split, room = places(kernel, device, here);
    const int waves = (blocks + room - 1) / room, share = (here.work.chunks + split - 1) / split;
    here.turns = (share + here.work.row_warps - 1) / here.work.row_warps;
    return waves * (here.turns + kWave + (split > 1 ? kPerBlock * split : 0));
  });
}

struct Decided {
  Kernel kernel;
  Plan plan;
};

cudaError_t decide(const Decode& call, const Device& device, Decided& decided) {
  const int token_tiles = call.g_idx ? 2 : (call.M + 7) / 8;
  Kernel& kernel = decided.kernel;
  Plan& plan = decided.plan;
  plan = Plan{};
  Chunks& work = plan.work;
  work.lay_groups(call.K, call.group);
  const Groups kind = is_scaled(call.code)                    ? Groups::kScaled
                      : is_number(call.code)                  ? Groups::kTiles
                      : call.offset_zero >= 0                 ? Groups::kOffsets
                      : call.g_idx                            ? Groups::kLookedUp
                      : work.has_small_groups()               ? Groups::kSmall
                      : is_symmetric(call) && token_tiles > 1 ? Groups::kSymmetric
                                                              : Groups::kChunks;
  plan.warps = device.shared > 160 << 10 ? most_warps(token_tiles, kind) : 8;
  const auto take = [&](bool brief) {
    kernel = call.bfloat16 ? kernel_of<__nv_bfloat16>(call, token_tiles, kind, brief)
                           : kernel_of<__half>(call, token_tiles, kind, brief);
    if (!kernel) return cudaErrorNotSupported;
    return allow_shared(reinterpret_cast<const void*>(kernel), device.shared);
  };
  if (const cudaError_t error = take(false)) return error;
  if (!divide(call, device, kernel, token_tiles, kind, plan)) return cudaErrorNotSupported;
  if (plan.turns <= 2)
    if (const cudaError_t error = take(true)) return error;
  work.lay_steps();
  return cudaSuccess;
}

}  // namespace

cudaError_t decode(const Decode& call, cudaStream_t stream) {
  if (call.M == 0 || call.outputs == 0) return cudaSuccess;
  const int most = is_symmetric(call) ? kMostSymmetric : call.own ? kMostOfOwn : kMostDecoded;
  if (call.M > most || call.K % kTileN || call.N % kTileN) return cudaErrorNotSupported;
  const Device device = this_device();
  const bool clusters = device.major >= 9;
  if (call.own && (call.K % kChunk || call.g_idx)) return cudaErrorNotSupported;
  if (call.offset_zero >= 0 && (!call.own || !call.zeros || is_number(call.code))) return cudaErrorNotSupported;
  const bool scaled = is_scaled(call.code);
  const bool groups = scaled ? has_scales_of(call.code, call.group) : call.group == kChunk || call.group >= call.K;
  if (is_number(call.code) && (!call.own || scaled == !call.zeros || !groups)) return cudaErrorNotSupported;
  static thread_local LaunchCache<Decided, 11> known;  // by all inputs of a decision
  const int kind = call.own + 2 * call.bfloat16 + 4 * (call.g_idx != nullptr) + 8 * (call.zeros != nullptr) + 16 * (call.offset_zero >= 0);
  const std::array<int, 11> key{device.index, call.M,    call.K,     call.N,       call.inputs, call.outputs,
                                static_cast<int>(call.code), call.group, kind,       call.columns, call.split};
  const Decided* found = known.find(key);
  Decided decided;
  if (!found) {
    if (const cudaError_t error = decide(call, device, decided)) return error;
    known.keep(key, decided);
  } else {
    decided = *found;
  }
  Plan& plan = decided.plan;
  plan.work.runs = !call.perm && (call.own ? call.inputs == call.K : call.inputs % 8 == 0) &&
                   reinterpret_cast<uintptr_t>(call.x) % 16 == 0;
  return launch(decided.kernel, dim3(plan.work.split, plan.rows_of_grid), 32 * plan.warps, plan.shared,
                plan.work.split, call.early && clusters, stream, call, plan.work);
}

}  // namespace qload::cuda
