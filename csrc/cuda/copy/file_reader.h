// Ranges of files to device memory, by threads without Python and its lock.
//
//   in      open files, read at positions; any alignment
//   out     memory of the device current at construction, contiguous for each range and for its runs
//   needs   pinned host memory: `threads` * BUFFERS buffers of `buffer_bytes`, a multiple of ALIGNED
//   limit   host memory, read and written once, then the bus
//
// Ranges are cut into chunks, and chunks are combined into jobs of one buffer. A thread reads a job into one of its
// buffers while a copy from the other one runs on the thread's own stream. Copies wait for the work on stream `home`
// before `begin`; `wait` names the stream that then waits for the copies.
//
// Equals `Tensor.copy_` of the result of `os.preadv`. A failure names its range; the memory of a failed ticket is
// undefined.
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
  int64_t runs = 1, distance = 0;  // so many ranges of `bytes`, one after another in memory, at a distance in the file
};

/// Cause of a failed ticket. All numbers are 0 at an early end of the file; `range` is -1 without a failure.
struct Failure {
  int64_t range = -1;                // the first failed range, by its index in `begin`
  int system = 0;                    // errno of the read; ECANCELED if the reader was closed before it
  cudaError_t device = cudaSuccess;  // error of a copy, or of an event before it
};

class FileReader {
 public:
  static constexpr int BUFFERS = 2;       // of a thread: one is copied while the other one is filled
  static constexpr size_t ALIGNED = 256;  // alignment of chunks in a buffer

  FileReader(void* memory, size_t buffer_bytes, int threads);
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

/// Begin to read. Descriptors stay open and memory stays allocated until `wait` or `close`.
  cudaError_t begin(const std::vector<FileRange>& ranges, cudaStream_t home, uint64_t* ticket);

/// Whether `wait` would return at once: all copies are started, now or within `patience`.
  bool is_read(uint64_t ticket, std::chrono::milliseconds patience);

/// Wait, once per ticket, until all copies are started; `stream` then waits for their end, and the host does not.
  Failure wait(uint64_t ticket, cudaStream_t stream);

/// Stop reading, and wait for the threads and all copies; buffers may be reused afterwards.
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
  std::vector<cudaEvent_t> free_;    // one per buffer: its copy has ended
  std::vector<cudaEvent_t> events_;  // unused events

  std::mutex lock_;  // guards all members below, and `events_`
  std::condition_variable more_, done_;
  std::deque<Job> jobs_;
  std::map<uint64_t, std::shared_ptr<Ticket>> tickets_;
  uint64_t last_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace qload::cuda
