#include "digits.h"

#include <algorithm>

namespace qload {

int log2_of(int64_t number) {
  int log = 0;
  while ((int64_t{1} << log) < number) ++log;
  return log;
}

int twos(int64_t size) {
  int count = 0;
  while (size % 2 == 0) size /= 2, ++count;
  return count;
}

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

bool lowest(const std::vector<Digit>& digits, int64_t Digit::*side, int need, std::vector<Bit>& bits, Cut* cut) {
  std::vector<bool> used(digits.size(), false);
  bits.clear();
  int64_t reached = 1;
  while (need > 0) {
    int found = -1;
    for (size_t d = 0; d < digits.size(); ++d)
      if (digits[d].*side == reached && !used[d] && digits[d].size > 1) found = static_cast<int>(d);
    if (found < 0) return false;
    const int64_t size = digits[found].size;
    const int have = std::min(twos(size), need);
    if (have < need && (int64_t{1} << have) != size) {
      if (cut && size >= (int64_t{1} << need)) *cut = {found, int64_t{1} << need};
      return false;
    }
    for (int level = 0; level < have; ++level) bits.push_back({found, level});
    used[found] = true;
    reached *= size;
    need -= have;
  }
  return true;
}

}  // namespace qload
