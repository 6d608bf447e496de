// Search for the division of a layer with the lowest cost.
#pragma once

#include "division.h"
#include "launch.h"

namespace qload::cuda {

/// `Work`: a Division with further fields of a kernel.
template <class Work>
struct Divided {
  Work work;
  int warps, rows_of_grid, shared;

/// Lay out shared memory for the sums of `tokens` tokens, `warp_bytes` for each warp; `tiles`: of the layer.
  void lay_out(int tiles, int tokens, int warp_bytes) {
    work.row_warps = warps / work.columns;
    rows_of_grid = (tiles + work.columns - 1) / work.columns;
    work.room_at = warps * warp_bytes;
    shared = work.room_at + (work.split > 1 ? work.columns * kTileN * tokens * 4 + 16 : 0);
  }
};

/// Set `plan` to the division of the lowest cost; false: none is possible. `columns`, `split`: fixed values, or 0 for
/// any, up to `most_columns`. `cost(plan)` lays out a plan with given `columns` and `split`; 0: it is impossible.
template <class Plan, class Cost>
bool cheapest(const Device& device, int columns, int split, int most_columns, Plan& plan, const Cost& cost) {
  double best = 0;
  Plan found{};
  for (int blocks = 1; blocks <= (device.major >= 9 ? 8 : 1); blocks *= 2)
    for (int tiles = 1; tiles <= most_columns; ++tiles) {
      if ((split && blocks != split) || (columns && tiles != columns)) continue;
      Plan here = plan;
      here.work.columns = tiles, here.work.split = blocks;
      const double costs = cost(here);
      if (costs > 0 && (best == 0 || costs < best)) best = costs, found = here;
    }
  plan = found;
  return best > 0;
}

}  // namespace qload::cuda
