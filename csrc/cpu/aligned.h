// Memory that starts where a register of any instruction set does, so that no load of one touches two lines.
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

/// Room for so many numbers, whose values are not set.
template <class T>
Aligned<T> aligned(int64_t count) {
  return Aligned<T>(static_cast<T*>(::operator new(static_cast<size_t>(count > 0 ? count : 1) * sizeof(T), kLine)));
}

}  // namespace qload::cpu
