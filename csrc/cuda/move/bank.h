// Positions of units in shared memory without bank conflicts of a warp's stores and loads.
#pragma once

#include "../../shared/both.h"

namespace qload::cuda {

/// Position of `place` in shared memory. Linear over the bits of a place; runs of 2**run_bits stay contiguous.
template <int run_bits>
QLOAD_BOTH constexpr int bank(int place) {
  constexpr int bits = 5 - run_bits, mask = (1 << bits) - 1;
  return place ^ ((((place >> 5) ^ (place >> (5 + bits))) & mask) << run_bits);
}

}  // namespace qload::cuda
