// What a launch asks of the device, and launches of clusters that may start early.
#pragma once

#include <cuda_runtime_api.h>

namespace qload::cuda {

struct Device {
  int multiprocessors, major, shared;  // shared: bytes a block can have
};

inline Device this_device() {
  static thread_local int known = -1;
  static thread_local Device device;
  int now = 0;
  cudaGetDevice(&now);
  if (now != known) {
    cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, now);
    cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, now);
    cudaDeviceGetAttribute(&device.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, now);
    known = now;
  }
  return device;
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
