// Pointers that Python passes as integers.
#pragma once

#include <cstdint>

namespace qload {

/// 0 is a pointer that is absent.
template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace qload
