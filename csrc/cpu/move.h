// A move of elements between two packed orders, on several threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace qload::cpu {

constexpr int64_t kLeastBytes = 1 << 15;   // of a move for each thread, at least
constexpr int64_t kStreamBytes = 1 << 21;  // least size of an output for stores past the caches

/// Moves all tiles, or elements, of the steps [begin, end) of the plan's outermost loop.
void run_plan(const Kernels& kernels, const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin,
              int64_t end, bool stream);

/// to[digits] = from[digits] for elements of 2, 4, 8, 16 or 32 bits.
void move(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const uint8_t* from, uint8_t* to,
          int threads);

}  // namespace qload::cpu
