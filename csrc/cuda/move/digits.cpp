// Digits as few as they can be.
#include <algorithm>

#include "plan.h"

namespace qload::cuda {

std::vector<Digit> merged(const std::vector<Digit>& digits, bool& empty) {
  std::vector<Digit> all;
  empty = false;
  for (const Digit& digit : digits) {
    empty |= digit.size == 0;
    if (digit.size > 1) all.push_back(digit);
  }
  std::sort(all.begin(), all.end(), [](const Digit& a, const Digit& b) { return a.to < b.to; });
  for (size_t d = 0; d + 1 < all.size();) {
    Digit& inner = all[d];
    const Digit& outer = all[d + 1];
    if (outer.from != inner.from * inner.size || outer.to != inner.to * inner.size ||
        outer.row != inner.row * inner.size) {
      ++d;
      continue;
    }
    inner.size *= outer.size;
    all.erase(all.begin() + static_cast<int64_t>(d) + 1);
  }
  return all;
}

}  // namespace qload::cuda
