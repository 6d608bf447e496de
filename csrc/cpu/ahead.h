// Memory that is asked for before it is read. A machine does so of its own accord, but not over the border of a page.
#pragma once

#include <cstdint>

namespace qload::cpu {
namespace {

constexpr int64_t kAhead = 4096;  // bytes

/// Only beside instructions that are written down: a compiler makes no lanes of a loop that asks, and none but GCC's
/// kind knows the word. No address is wrong, as what is not there is not read.
inline void ask_ahead([[maybe_unused]] const void* from, [[maybe_unused]] int64_t bytes = kAhead) {
#if defined(__GNUC__) && defined(__AVX2__)
  const uintptr_t at = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes);
  __builtin_prefetch(reinterpret_cast<const void*>(at));
#endif
}

}  // namespace
}  // namespace qload::cpu
