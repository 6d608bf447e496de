// Memory aligned to a cache line, and so to registers of any instruction set: no load of one touches two lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace qload::cpu {

constexpr std::align_val_t kLine{64};

struct DeleteAligned {
  void operator()(void* memory) const { ::operator delete(memory, kLine); }
};

template <class T>
using Aligned = std::unique_ptr<T[], DeleteAligned>;

/// Memory for `count` numbers, uninitialized.
template <class T>
Aligned<T> aligned(int64_t count) {
  return Aligned<T>(static_cast<T*>(::operator new(static_cast<size_t>(count > 0 ? count : 1) * sizeof(T), kLine)));
}

}  // namespace qload::cpu
