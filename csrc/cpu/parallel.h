// A range divided among the threads of one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "team.h"

namespace qload::cpu {

constexpr int64_t kChunks = 8;  // for each thread: if one is delayed, the others take its chunks

/// Chunks of a range; threads take them one after another.
template <class Work>
struct Chunks {
  const Work& work;
  const int64_t count, chunks;
  std::atomic<int64_t> next{0};
  std::atomic_flag has_failed = ATOMIC_FLAG_INIT;
  std::exception_ptr failed{};  // written by one thread, read after all have returned

  static void share(void* self) {
    Chunks& all = *static_cast<Chunks*>(self);
    try {
      for (int64_t i = all.next++; i < all.chunks; i = all.next++)
        all.work(all.count * i / all.chunks, all.count * (i + 1) / all.chunks);
    } catch (...) {
      if (!all.has_failed.test_and_set()) all.failed = std::current_exception();
    }
  }
};

/// Calls `work(begin, end)` over [0, count), on at most `threads` threads, in chunks of at least `least`.
template <class Work>
void parallel_for(int64_t count, int64_t least, int threads, const Work& work) {
  const int64_t most = std::max<int64_t>(1, count / std::max<int64_t>(least, 1));
  if (threads <= 1 || most <= 1) return work(0, count);
  Chunks<Work> all{work, count, std::min(threads * kChunks, most)};
  on_threads(is_on_threads_of_torch() ? threads : static_cast<int>(std::min<int64_t>(threads, most)),
             Chunks<Work>::share, &all);  // all threads: for a team of another size OpenMP starts new ones, then torch again
  if (all.failed) std::rethrow_exception(all.failed);
}

}  // namespace qload::cpu
