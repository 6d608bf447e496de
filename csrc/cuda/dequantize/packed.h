// What a launch of tiles.cuh needs to know, from a plan.
#pragma once

#include <vector>

#include "../move/bank.h"
#include "dequantize.h"
#include "tiles.h"

namespace qload::cuda {

constexpr int kLeastSame = 2;  // for which a block makes a table of what its words share

/// A plan of words to rows; false: there is none. `pairs`: codes are taken in pairs, and may lie so in words:
/// then `is_paired`.
bool make_packed(int bits, const std::vector<Digit>& digits, uintptr_t codes, bool pairs, Plan& plan,
                 bool& is_paired);

/// All of `tiles` but pitch, row_words_bits and paired; false: only general.cuh takes this plan.
bool fill_tiles(const Plan& plan, const Meaning& meaning, const Matrix& matrix, int bits, Tiles& tiles);

}  // namespace qload::cuda
