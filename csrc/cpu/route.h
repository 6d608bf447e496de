// The steps of a plan: exchanges, swaps and shuffles that bring the bits of an element's index to their positions.
#pragma once

#include <vector>

#include "plan.h"

namespace qload::cpu {

constexpr int kByte = 3;  // position 3 is the lowest bit of a byte's address

/// Adds steps to a plan for elements of plan.bits in registers of plan.width. From position log2(plan.bits) on,
/// `places` lists the bit at each position, `wanted` the required one; `apart`, the bits of a register's number, is
/// updated.
void route(Plan& plan, const std::vector<int>& places, const std::vector<int>& wanted, std::vector<int>& apart);

}  // namespace qload::cpu
