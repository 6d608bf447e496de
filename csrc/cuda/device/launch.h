// What a launch asks of the device, and launches of clusters that may start early.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace qload::cuda {

struct Device {
  int multiprocessors, major, shared;  // major: of what the code may use; shared: bytes a block can have
  int index;
};

// A newer chip runs code that was made for older ones, which has none of its instructions.
constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
constexpr int kNewest = kCompiled[sizeof kCompiled / sizeof *kCompiled - 1] / 100;

inline Device this_device() {
  static thread_local int known = -1;
  static thread_local Device device;
  int now = 0;
  cudaGetDevice(&now);
  if (now != known) {
    cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, now);
    cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, now);
    device.major = std::min(device.major, kNewest);
    cudaDeviceGetAttribute(&device.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, now);
    device.index = known = now;
  }
  return device;
}

/// Blocks of a kernel may have so many bytes of shared memory, or fewer; the driver is told of each new maximum.
inline cudaError_t allow_shared(const void* kernel, int bytes) {
  struct Told {
    const void* kernel;
    int device, bytes;
  };
  static thread_local std::vector<Told> all;
  const int device = this_device().index;
  const auto told = std::find_if(
      all.begin(), all.end(), [&](const Told& each) { return each.kernel == kernel && each.device == device; });
  if (told != all.end() && told->bytes >= bytes) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  if (told != all.end())
    told->bytes = bytes;
  else
    all.push_back({kernel, device, bytes});
  return cudaSuccess;
}

/// `cluster` blocks along x are one; `early`: may start before the kernel ahead ends, and waits for it itself.
template <class... Arguments>
cudaError_t launch(void (*kernel)(Arguments...), dim3 grid, int threads, int shared, int cluster, bool early,
                   cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    auto& size = attributes[config.numAttrs++].val.clusterDim;
    size.x = cluster, size.y = size.z = 1;
  }
  if (early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace qload::cuda
