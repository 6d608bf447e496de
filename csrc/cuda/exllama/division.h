// The division of a layer among blocks; each warp has a run of chunks of K.
#pragma once

#include "../device/division.h"

namespace qload::cuda::exl {

constexpr int kTokens = 16;  // maximum of a block

struct Shares : Division {  // the same for all blocks
  int column_factor;        // a warp's number * column_factor >> 16 is the number / columns
  int share, rest;          // chunks of a warp; number of first warps with one chunk more
};

}  // namespace qload::cuda::exl
