// As much of CUDA's runtime as the reader of files needs, without a GPU: the device's memory is the host's, and each
// stream is a thread that carries out what it was asked for in order, and late.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

enum cudaError_t { cudaSuccess, cudaErrorUnknown };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventBlockingSync = 1;

/// The last of what streams were asked to record here, and the last that was reached.
struct Recorded {
  std::mutex lock;
  std::condition_variable changed;
  long asked = 0, reached = 0;

  void reach(long number) {
    const std::lock_guard<std::mutex> held(lock);
    if (number > reached) reached = number;
    changed.notify_all();
  }
  void wait(long number) {
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [&] { return reached >= number; });
  }
  long last() {
    const std::lock_guard<std::mutex> held(lock);
    return asked;
  }
};

struct CUevent_st {
  std::shared_ptr<Recorded> recorded = std::make_shared<Recorded>();  // outlives the event while a stream waits
};
using cudaEvent_t = CUevent_st*;

class CUstream_st {
 public:
  CUstream_st() : thread_([this] { work(); }) {}
  ~CUstream_st() {
    ask(nullptr);
    thread_.join();
  }
  void ask(std::function<void()> task) {
    const std::lock_guard<std::mutex> held(lock_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  /// How many tasks it has not begun.
  size_t left() {
    const std::lock_guard<std::mutex> held(lock_);
    return tasks_.size();
  }
  void synchronize() {
    Recorded here;
    ask([&] { here.reach(1); });
    here.wait(1);
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> held(lock_);
      changed_.wait(held, [&] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      held.unlock();
      if (!task) return;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      task();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};
using cudaStream_t = CUstream_st*;

/// What a test plans and counts.
struct Device {
  std::mutex lock;
  int copies_until_failure = -1;  // which then fails, once
  int held = 0;                   // streams and events that were made and not given back
  size_t left = 0;                // tasks of streams that were given back
};
inline Device& device() {
  static Device one;
  return one;
}
inline void count(int change) {
  const std::lock_guard<std::mutex> held(device().lock);
  device().held += change;
}

inline cudaError_t cudaGetDevice(int* number) { return *number = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "planned by the test"; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new CUstream_st, count(1), cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return stream->synchronize(), cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const size_t left = stream->left();
  delete stream;
  count(-1);
  const std::lock_guard<std::mutex> held(device().lock);
  return device().left += left, cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, count(1), cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, count(-1), cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return event->recorded->wait(event->recorded->last()), cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto recorded = event->recorded;
  long number;
  {
    const std::lock_guard<std::mutex> held(recorded->lock);
    number = ++recorded->asked;
  }
  return stream->ask([=] { recorded->reach(number); }), cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto recorded = event->recorded;
  const long number = recorded->last();
  return stream->ask([=] { recorded->wait(number); }), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> held(device().lock);
    if (device().copies_until_failure >= 0 && !device().copies_until_failure--) return cudaErrorUnknown;
  }
  return stream->ask([=] { std::memcpy(to, from, bytes); }), cudaSuccess;
}
