// How a launch divides a layer among blocks whose warps have runs of chunks of K.
#pragma once

#include "../device/division.h"

namespace qload::cuda::exl {

constexpr int kTokens = 16;  // of a block at the most

struct Shares : Division {  // and what else is the same for all blocks
  int column_factor;        // a warp's number times this, shifted by 16, is divided by columns
  int share, rest;          // chunks of a warp; how many of the first warps have one more
};

}  // namespace qload::cuda::exl
