// Memory that is asked for before it is read. A machine does so of its own accord, but not over the border of a page.
#pragma once

#include <cstdint>

namespace qload::cpu {
namespace {

constexpr int64_t kAhead = 4096;  // bytes

inline void ask_ahead(const void* from) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + kAhead));
}

}  // namespace
}  // namespace qload::cpu
