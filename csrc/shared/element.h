// One element of 2, 4, 8, 16 or 32 bits among packed ones.
#pragma once

#include <cstdint>
#include <cstring>

#include "both.h"

namespace qload {

template <class Word>
QLOAD_BOTH inline void copy_word(const void* from, int64_t source, void* to, int64_t target) {
#ifdef __CUDA_ARCH__
  static_cast<Word*>(to)[target] = static_cast<const Word*>(from)[source];
#else  // memory of the host has any alignment
  std::memcpy(static_cast<char*>(to) + target * static_cast<int64_t>(sizeof(Word)),
              static_cast<const char*>(from) + source * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
#endif
}

/// to[target] = from[source]. False, with nothing written, for elements smaller than a byte, which share it.
QLOAD_BOTH inline bool copy_element(int bits, const void* from, int64_t source, void* to, int64_t target) {
  switch (bits) {
    case 8:
      copy_word<uint8_t>(from, source, to, target);
      return true;
    case 16:
      copy_word<uint16_t>(from, source, to, target);
      return true;
    case 32:
      copy_word<uint32_t>(from, source, to, target);
      return true;
    default:
      return false;
  }
}

/// An element smaller than a byte; the first element of a byte is in its low bits.
QLOAD_BOTH inline uint32_t code_at(int bits, const void* from, int64_t source) {
  const int64_t per_byte = 8 / bits;
  return static_cast<const uint8_t*>(from)[source / per_byte] >> (source % per_byte * bits) & ((1u << bits) - 1);
}

}  // namespace qload
