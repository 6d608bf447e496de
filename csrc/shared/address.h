// Conversion of addresses from Python, as integers, to pointers.
#pragma once

#include <cstdint>

namespace qload {

/// 0 gives a null pointer.
template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace qload
