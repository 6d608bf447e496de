// Where units lie in shared memory, so that a warp neither writes nor reads one bank twice.
#pragma once

#include "../../shared/both.h"

namespace qload::cuda {

/// Where place `place` lies in shared memory. Linear over the bits of a place; runs of 2**run_bits stay whole.
template <int run_bits>
QLOAD_BOTH constexpr int bank(int place) {
  constexpr int bits = 5 - run_bits, mask = (1 << bits) - 1;
  return place ^ ((((place >> 5) ^ (place >> (5 + bits))) & mask) << run_bits);
}

}  // namespace qload::cuda
