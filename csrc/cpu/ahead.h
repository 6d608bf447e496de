// Memory that is asked for before it is read, into the second cache. A machine reads ahead of its own accord too, but
// not over the border of a page, and less far where a second stream, as inputs are, leaves the nearest cache again and
// again. What is asked for into the nearest cache would drive inputs out of it.
#pragma once

#include <cstdint>

namespace qload::cpu {
namespace {

constexpr int64_t kAhead = 24 << 10;  // bytes: as many as a core reads in 0.8 us, which memory may take to answer

/// Only beside instructions that are written down: a compiler makes no lanes of a loop that asks, and none but GCC's
/// kind knows the word. No address is wrong, as what is not there is not read.
inline void ask_ahead([[maybe_unused]] const void* from, [[maybe_unused]] int64_t bytes = kAhead) {
#if defined(__GNUC__) && defined(__AVX2__)
  constexpr int kForReading = 0, kSecondCache = 2;
  const uintptr_t at = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes);
  __builtin_prefetch(reinterpret_cast<const void*>(at), kForReading, kSecondCache);
#endif
}

}  // namespace
}  // namespace qload::cpu
