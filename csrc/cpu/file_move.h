// A move of elements whose source lies in a file, which is read in pieces that stay in the cache.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace qload::cpu {

struct FileBytes {  // of a file that is open
  int descriptor;
  int64_t begin, count;
};

/// What `move` does, of elements of a file. `scratch`: for each thread `piece` bytes, from a multiple of 64 on, of
/// which as many are filled at once as stay in a cache.
///
/// False where the move cannot be made in pieces of so many bytes, or a piece could not be read whole: what `to`
/// holds then is nothing.
bool move_from_file(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const FileBytes& from,
                    uint8_t* to, uint8_t* scratch, int64_t piece, int threads);

}  // namespace qload::cpu
