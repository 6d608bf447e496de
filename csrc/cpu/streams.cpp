// Bit streams: a list of bit fields, moved in each run of words.
//
//   to[run][field.to] |= (from[run][field.from] >> from_bit & mask) << to_bit      for every field
//
//   in   from  uint32  runs of `from_words` words
//   out  to    uint32  runs of `to_words` words
//
// The kernel (narrow.h) processes the innermost axis of lanes, and keeps 64 runs in the cache; threads divide the
// other axes. Equals Packing.pack and Packing.unpack (qload/layouts/packing.py) for any fields.
#include "streams.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "../shared/loops.h"
#include "move.h"
#include "parallel.h"

namespace qload::cpu {
namespace {

constexpr int64_t kRuns = 1024;  // in one call of the kernel: divides a long axis among several threads

// Interleaves the fields of different words, because those of one word depend on each other.
std::vector<Field> in_turns(const std::vector<Field>& fields) {
  int before[kMostWords] = {};
  std::vector<std::pair<int, Field>> turns;
  for (const Field& field : fields) turns.emplace_back(before[field.to]++, field);
  std::stable_sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Field> sorted;
  for (const auto& turn : turns) sorted.push_back(turn.second);
  return sorted;
}

}  // namespace

uint32_t move_fields(const Kernels& kernels, const std::vector<Field>& fields, int from_words, int to_words,
                     int64_t from_word, int64_t to_word, const std::vector<Digit>& lanes, const uint32_t* from,
                     uint32_t* to, int threads) {
  if (from_words > kMostWords || to_words > kMostWords || lanes.empty())
    throw std::invalid_argument("runs of fields have at most 32 words, and an axis to lie along");
  const std::vector<Field> sorted = in_turns(fields);
  const Digit& inner = lanes[0];
  const int outer = static_cast<int>(lanes.size()) - 1;
  const int64_t parts = (inner.size + kRuns - 1) / kRuns;
  int64_t count = parts;
  for (int axis = 1; axis <= outer; ++axis) count *= lanes[axis].size;
  const int64_t bytes = 4 * (from_words + to_words) * std::min(inner.size, kRuns);
  std::atomic<uint32_t> seen{0};
  parallel_for(count, kLeastBytes / std::max<int64_t>(bytes, 1) + 1, threads, [&](int64_t begin, int64_t end) {
    uint32_t here = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % parts * kRuns;
      const Offsets at = offsets_of(lanes.data() + 1, outer, i / parts);
      const Runs runs{from + first * inner.from + at.from, to + first * inner.to + at.to, from_word, to_word,
                      inner.from, inner.to};
      here |= kernels.fields(runs, sorted.data(), static_cast<int>(sorted.size()), from_words, to_words,
                             std::min(kRuns, inner.size - first));
    }
    seen.fetch_or(here, std::memory_order_relaxed);
  });
  return seen;
}

}  // namespace qload::cpu
