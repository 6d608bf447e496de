// Threads for one call: made, used and joined, so that nothing runs between calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace qload::cpu {

constexpr int64_t kChunks = 8;  // of each thread: one that is held up leaves them to the others

/// Threads that are waited for wherever their block is left: one that is not would end the process.
struct Joined {
  std::vector<std::thread> threads;
  ~Joined() {
    for (auto& each : threads) each.join();
  }
};

/// `work(begin, end)` over [0, count), by at most `threads` threads, in chunks of at least `least`.
template <class Work>
void parallel_for(int64_t count, int64_t least, int threads, const Work& work) {
  const int64_t most = std::max<int64_t>(1, count / std::max<int64_t>(least, 1));
  const int64_t several = std::min<int64_t>(threads, most);
  if (several <= 1) return work(0, count);
  const int64_t chunks = std::min(several * kChunks, most);
  std::atomic<int64_t> next{0};
  std::vector<std::exception_ptr> failed(static_cast<size_t>(several));
  const auto share = [&](int64_t thread) {
    try {
      for (int64_t i = next++; i < chunks; i = next++) work(count * i / chunks, count * (i + 1) / chunks);
    } catch (...) {
      failed[static_cast<size_t>(thread)] = std::current_exception();
    }
  };
  {
    Joined others;
    try {
      others.threads.reserve(static_cast<size_t>(several - 1));
      for (int64_t thread = 1; thread < several; ++thread) others.threads.emplace_back(share, thread);
    } catch (const std::exception&) {  // no more threads to be had, or no memory: those that are do the work
    }
    share(0);
  }
  for (const auto& error : failed)
    if (error) std::rethrow_exception(error);
}

}  // namespace qload::cpu
