// Bit streams: codes of any width to words and back, and words to words, where fields straddle them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace qload::cpu {

/// Moves `fields` of every run; `lanes`: the axes along which runs lie, innermost first, in words. Words of a run
/// are `from_word` and `to_word` apart. Bits of `to` that no field names become 0. Returns all bits seen.
uint32_t move_fields(const Kernels&, const std::vector<Field>& fields, int from_words, int to_words,
                     int64_t from_word, int64_t to_word, const std::vector<Digit>& lanes, const uint32_t* from,
                     uint32_t* to, int threads);

}  // namespace qload::cpu
