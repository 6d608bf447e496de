// Ranges of files to memory of a device, by threads that know nothing of Python and of its lock.
//
//   in      open files, read at positions; any alignment
//   out     memory of the device that was current when the reader was made, in one piece for each range
//   needs   pinned memory of the host: `threads` * BUFFERS buffers of `buffer_bytes`, a multiple of ALIGNED
//   limit   memory of the host, which is read and written once, then the bus
//
// Ranges are cut into chunks, and chunks are put together to jobs of a buffer each. A thread reads a job into a
// buffer of its own while the other one is copied from, on a stream of its own. Copies wait for what the stream
// at home was asked for before `begin`; whoever waits for a ticket names the stream that waits for its copies.
//
// Equals `Tensor.copy_` of what `os.preadv` reads. A range that could not be read is named, and nothing is said
// of the memory of a ticket that failed.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace qload::cuda {

struct FileRange {
  int descriptor;
  int64_t offset;
  size_t bytes;
  void* to;
};

/// Why a ticket failed. All are 0 where the file ended early, and `range` is -1 where nothing failed.
struct Failure {
  int64_t range = -1;                // the first one that is known to have failed, as it was handed to `begin`
  int system = 0;                    // errno of the read; ECANCELED where the reader was closed before it
  cudaError_t device = cudaSuccess;  // of a copy, or of what it waited for
};

class FileReader {
 public:
  static constexpr int BUFFERS = 2;       // of a thread: one is copied from while the other is filled
  static constexpr size_t ALIGNED = 256;  // bytes at whose multiples chunks begin in a buffer

  FileReader(void* memory, size_t buffer_bytes, int threads);
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  /// Begins to read: descriptors stay open, and memory stays, until the ticket was waited for or all is closed.
  cudaError_t begin(const std::vector<FileRange>& ranges, cudaStream_t home, uint64_t* ticket);

  /// Whether `wait` would return at once: all copies were asked for, here or within so long.
  bool is_read(uint64_t ticket, std::chrono::milliseconds patience);

  /// Waits, each ticket once, until all copies were asked for; `stream` then waits for them, and the host does not.
  Failure wait(uint64_t ticket, cudaStream_t stream);

  /// Reads nothing more, and waits for the threads and for all copies, whose buffers may be used again then.
  cudaError_t close();

 private:
  struct Ticket;
  struct Chunk {
    FileRange range;
    int64_t number;
    size_t at;  // in the buffer
  };
  struct Job {
    std::shared_ptr<Ticket> ticket;
    std::vector<Chunk> chunks;
    cudaEvent_t copied;
  };
  struct Ticket {
    cudaEvent_t ready;
    std::vector<cudaEvent_t> copied;
    size_t pending;
    Failure failure;
  };

  void work(int own);
  Failure read(const Job& job, char* buffer);
  Failure copy(const Job& job, const char* buffer, cudaStream_t stream, cudaEvent_t free);
  void end(const Job& job, const Failure& failure);
  std::vector<std::vector<Chunk>> divide(const std::vector<FileRange>& ranges) const;
  cudaError_t take_event(cudaEvent_t* event);
  std::map<uint64_t, std::shared_ptr<Ticket>>::iterator find(uint64_t number);

  char* const memory_;
  const size_t buffer_bytes_;
  int device_ = 0;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> free_;    // of each buffer: it was copied from
  std::vector<cudaEvent_t> events_;  // that no ticket holds

  std::mutex lock_;  // of all below, and of `events_`
  std::condition_variable more_, done_;
  std::deque<Job> jobs_;
  std::map<uint64_t, std::shared_ptr<Ticket>> tickets_;
  uint64_t last_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace qload::cuda
