// Arguments of tiles.cuh from a plan.
#pragma once

#include <vector>

#include "../move/bank.h"
#include "dequantize.h"
#include "tiles.h"

namespace qload::cuda {

constexpr int kLeastSame = 2;  // minimal size (power of two) of runs with one scale, for a table in shared memory

/// Plan a move of words to rows; false: impossible. `pairs`: codes are expanded in pairs; `is_paired`: the plan puts
/// the codes of a pair four positions apart.
bool make_packed(int bits, const std::vector<Digit>& digits, uintptr_t codes, bool pairs, Plan& plan,
                 bool& is_paired);

/// Set all fields of `tiles` except pitch, row_words_bits and paired; false: the plan is for general.cuh only.
bool fill_tiles(const Plan& plan, const Meaning& meaning, const Matrix& matrix, int bits, Tiles& tiles);

}  // namespace qload::cuda
