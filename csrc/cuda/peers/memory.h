// Memory of a device that the devices of other processes of this machine write to.
//
// Each rank allocates the same layout and opens that of every other rank by its handle:
//
//   header   the number of the last sum, and the blocks that have ended; only for the rank itself
//   flags    of the blocks of each rank, for even and for odd sums
//   lines    short messages of each rank with their flags, for even and for odd sums
//   data     long messages of each rank, for even and for odd sums
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../../shared/both.h"

namespace qload::cuda {

constexpr int kMostRanks = 8, kMostBlocks = 4096;      // of a world; of a launch
constexpr size_t kHeaderBytes = 256, kLineBytes = 256 << 10;  // kLineBytes: the largest short message
constexpr size_t kDataBytes = 16 << 20;                // long messages of all ranks

/// What a kernel knows of the memory of all ranks.
struct PeerView {
  unsigned char* at[kMostRanks];  // in the address space of this device
  const int* stop;                // host memory; not 0: a rank is lost, nobody waits any longer
  int rank, world;

  QLOAD_BOTH size_t message_bytes() const { return kDataBytes / world / 16 * 16; }  // the largest message

  QLOAD_BOTH size_t bytes() const { return data(1, world); }

  // Offsets of what rank `from` writes in sums of a parity.
  QLOAD_BOTH size_t flags(int parity, int from) const {
    return kHeaderBytes + (size_t(parity) * world + from) * kMostBlocks * sizeof(uint32_t);
  }
  QLOAD_BOTH size_t lines(int parity, int from) const { return flags(2, 0) + (size_t(parity) * world + from) * 2 * kLineBytes; }
  QLOAD_BOTH size_t data(int parity, int from) const { return lines(2, 0) + (size_t(parity) * world + from) * message_bytes(); }
};

/// The memory of one rank, and that of all others. Not copied; `close` or the destructor frees it.
class PeerMemory {
 public:
  PeerMemory(int rank, int world);  // on the current device
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory() { close(); }

  std::string handle() const;  // for the other processes
  void connect(const std::vector<std::string>& handles);
  const PeerView& view() const { return view_; }
  void stop() { *stop_ = 1; }  // kernels that wait for other ranks end, with undefined results
  void close();                // once no kernel uses the memory

 private:
  PeerView view_{};
  int* stop_ = nullptr;
  int device_ = 0;
};

}  // namespace qload::cuda
