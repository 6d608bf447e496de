// The steps of a plan: which exchanges, swaps and shuffles bring the bits of an element's number to their places.
#pragma once

#include <vector>

#include "plan.h"

namespace qload::cpu {

constexpr int kByte = 3;  // position 3 is the lowest that tells bytes apart

/// Adds steps to a plan of elements of plan.bits in registers of plan.width. The bit at each position from log2 of
/// plan.bits on is `places`, and becomes `wanted`; `apart`, the bits that tell registers apart, change with them.
void route(Plan& plan, const std::vector<int>& places, const std::vector<int>& wanted, std::vector<int>& apart);

}  // namespace qload::cpu
