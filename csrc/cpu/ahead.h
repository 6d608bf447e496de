// Software prefetch into the second-level cache. The hardware prefetcher stops at the border of a page. It also reads
// less far ahead if a second stream, such as the inputs, keeps leaving the first-level cache. A prefetch into the
// first-level cache would evict inputs from it.
#pragma once

#include <cstdint>

namespace qload::cpu {
namespace {

constexpr int64_t kAhead = 24 << 10;  // bytes: a core reads as many in 0.8 us, a possible latency of memory

/// Only for code with explicit intrinsics: a compiler does not vectorize a loop with a prefetch, and only compilers
/// with GCC's builtins have the function. No address is invalid: a prefetch of unmapped memory does nothing.
inline void ask_ahead([[maybe_unused]] const void* from, [[maybe_unused]] int64_t bytes = kAhead) {
#if defined(__GNUC__) && defined(__AVX2__)
  constexpr int kForReading = 0, kSecondCache = 2;
  const uintptr_t at = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes);
  __builtin_prefetch(reinterpret_cast<const void*>(at), kForReading, kSecondCache);
#endif
}

}  // namespace
}  // namespace qload::cpu
