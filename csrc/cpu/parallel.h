// Threads for one call: made, used and joined, so that nothing runs between calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace qload::cpu {

/// `work(begin, end)` over [0, count) in at most `threads` parts of at least `least` each.
template <class Work>
void parallel_for(int64_t count, int64_t least, int threads, const Work& work) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, count / std::max<int64_t>(least, 1)));
  std::vector<std::thread> others;
  std::vector<std::exception_ptr> failed(static_cast<size_t>(parts));
  const auto part = [&](int64_t i) {
    try {
      work(count * i / parts, count * (i + 1) / parts);
    } catch (...) {
      failed[static_cast<size_t>(i)] = std::current_exception();
    }
  };
  int64_t started = 1;
  try {
    for (; started < parts; ++started) others.emplace_back(part, started);
  } catch (const std::system_error&) {  // no more threads to be had: this one does the rest
  }
  part(0);
  for (int64_t i = started; i < parts; ++i) part(i);
  for (auto& other : others) other.join();
  for (const auto& error : failed)
    if (error) std::rethrow_exception(error);
}

}  // namespace qload::cpu
