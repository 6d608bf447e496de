#include "memory.h"

#include <cstring>
#include <stdexcept>

namespace qload::cuda {

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a refusal is no error of later calls
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

PeerMemory::PeerMemory(int rank, int world) {
  if (world < 2 || world > kMostRanks || rank < 0 || rank >= world) throw std::runtime_error("peer memory: no such rank");
  view_.rank = rank, view_.world = world;
  try {
    check(cudaGetDevice(&device_), "peer memory");
    void* memory = nullptr;
    check(cudaMalloc(&memory, view_.bytes()), "peer memory");
    view_.at[rank] = static_cast<unsigned char*>(memory);
    check(cudaMemset(memory, 0, view_.bytes()), "peer memory");
    check(cudaDeviceSynchronize(), "peer memory");  // before a peer writes
    void* stop = nullptr;
    check(cudaHostAlloc(&stop, sizeof(int), cudaHostAllocMapped), "peer memory");
    stop_ = static_cast<int*>(stop), *stop_ = 0, view_.stop = stop_;
  } catch (...) {
    close();
    throw;
  }
}

std::string PeerMemory::handle() const {
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, view_.at[view_.rank]), "peer memory: handle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof handle);
}

void PeerMemory::connect(const std::vector<std::string>& handles) {
  if (handles.size() != static_cast<size_t>(view_.world)) throw std::runtime_error("peer memory: a handle for each rank");
  for (int rank = 0; rank < view_.world; ++rank) {
    if (rank == view_.rank) continue;
    cudaIpcMemHandle_t handle;
    if (handles[rank].size() != sizeof handle) throw std::runtime_error("peer memory: not a handle");
    std::memcpy(&handle, handles[rank].data(), sizeof handle);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "peer memory: open");
    view_.at[rank] = static_cast<unsigned char*>(memory);
  }
}

void PeerMemory::close() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  for (int rank = 0; rank < view_.world; ++rank) {
    if (view_.at[rank]) rank == view_.rank ? cudaFree(view_.at[rank]) : cudaIpcCloseMemHandle(view_.at[rank]);
    view_.at[rank] = nullptr;
  }
  if (stop_) cudaFreeHost(stop_);
  stop_ = nullptr, view_.stop = nullptr;
  cudaSetDevice(before);
}

}  // namespace qload::cuda
