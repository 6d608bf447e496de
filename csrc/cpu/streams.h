// Bit streams: codes of any width to words and back, and words to words, with fields across word borders.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace qload::cpu {

/// Moves `fields` of every run; `lanes`: the axes of runs, innermost first, in words. Words of a run are `from_word`
/// and `to_word` apart. Bits of `to` outside of all fields become 0. Returns the OR of all words that it read.
uint32_t move_fields(const Kernels&, const std::vector<Field>& fields, int from_words, int to_words,
                     int64_t from_word, int64_t to_word, const std::vector<Digit>& lanes, const uint32_t* from,
                     uint32_t* to, int threads);

}  // namespace qload::cpu
