// Registers for any machine: unsigned integers of 4 or 8 bytes.
//
// The interface of a register, also in vector_avx2.h and vector_avx512.h:
//   kPositions               one more than its highest position (see plan.h)
//   load, store, stream      any alignment; `stream` needs alignment to whole registers
//   exchange<Position>       of two registers: the bits of the first with a 1 in the position, and
//                            those of the second with a 0
//   swap                     of two positions: bits under `mask` with those `distance` above them
//   Table                    a shuffle of bytes
#pragma once

#include <cstdint>
#include <cstring>

#include "plan.h"

namespace qload::cpu {
namespace {

/// The mask of bits with a 0 at a position of their address.
constexpr uint64_t below(int position) {
  uint64_t mask = 0;
  for (int bit = 0; bit < 64; ++bit)
    if (!(bit >> position & 1)) mask |= uint64_t{1} << bit;
  return mask;
}

constexpr uint64_t kBelow[] = {below(0), below(1), below(2), below(3), below(4), below(5)};

template <class Word, int Positions>
struct Scalar {
  using T = Word;
  static constexpr int kPositions = Positions;

  static T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static void prefetch(const uint8_t*) {}
  static void store(uint8_t* to, T value) { std::memcpy(to, &value, sizeof value); }
  static void stream(uint8_t* to, T value) { store(to, value); }

  template <int Position>
  static void exchange(T a, T b, T& low, T& high) {
    constexpr T kept = static_cast<T>(below(Position));
    constexpr int distance = 1 << Position;
    low = (a & kept) | ((b & kept) << distance);
    high = ((a >> distance) & kept) | (b & static_cast<T>(~kept));
  }

  static T swap(T value, int distance, uint64_t mask) {
    const T moved = ((value >> distance) ^ value) & static_cast<T>(mask);
    return value ^ moved ^ (moved << distance);
  }

  struct Table {
    const uint8_t* source;
    explicit Table(const Shuffle& shuffle) : source(shuffle.source) {}
    T apply(T value) const {
      T moved = 0;
      for (unsigned byte = 0; byte < sizeof(T); ++byte)
        moved |= ((value >> (8 * source[byte])) & 0xFF) << (8 * byte);
      return moved;
    }
  };
};

using Scalar4 = Scalar<uint32_t, 5>;
using Scalar8 = Scalar<uint64_t, 6>;

}  // namespace
}  // namespace qload::cpu
