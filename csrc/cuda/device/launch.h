// Properties of a device, and launches of clusters with an optional early start.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace qload::cuda {

struct Device {
  int multiprocessors, major, shared;  // major: of the compiled code; shared: maximal bytes of a block
  int index;
};

// Code for an older chip, without the instructions of newer ones, runs on a chip between or after the compiled ones.
inline int major_of_code(int major, int minor) {
  int newest = 0;
  for (const int compiled : {__CUDA_ARCH_LIST__})
    if (compiled <= 100 * major + 10 * minor) newest = std::max(newest, compiled);
  return newest / 100;
}

inline Device this_device() {
  static thread_local int known = -1;
  static thread_local Device device;
  int now = 0;
  cudaGetDevice(&now);
  if (now != known) {
    cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, now);
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, now);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, now);
    device.major = major_of_code(major, minor);
    cudaDeviceGetAttribute(&device.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, now);
    device.index = known = now;
  }
  return device;
}

/// Allow blocks of a kernel `bytes` of shared memory. The driver is called only for a new maximum.
inline cudaError_t allow_shared(const void* kernel, int bytes) {
  struct Allowed {
    const void* kernel;
    int device, bytes;
  };
  static thread_local std::vector<Allowed> all;
  const int device = this_device().index;
  const auto told = std::find_if(
      all.begin(), all.end(), [&](const Allowed& each) { return each.kernel == kernel && each.device == device; });
  if (told != all.end() && told->bytes >= bytes) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  if (told != all.end())
    told->bytes = bytes;
  else
    all.push_back({kernel, device, bytes});
  return cudaSuccess;
}

/// `cluster`: blocks along x of a cluster; `early`: the kernel may start before the previous one ends, and waits itself.
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
