// A move of elements from a file.
//
//   to[sum digit * to_stride] = file[sum digit * from_stride]
//
// Threads take pieces of the source one after another; a piece is some steps of the plan's outermost loop. A thread
// reads a piece into its own buffer, always the same one, which stays in the second-level cache, and moves it
// from there to its target. So the memory traffic is that of a copy of the file: each byte is read once and
// written once. A step larger than such a piece is a piece by itself, if the buffer has room. If the file is
// truncated meanwhile, a read ends early; a memory map would end the process.
//
// Equals `move` (move.cpp) of the same bytes, bit for bit.
#include "file_move.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "../shared/file_read.h"
#include "move.h"
#include "team.h"

namespace qload::cpu {
namespace {

constexpr int64_t kAtOnce = 1 << 19;  // bytes of a piece, unless a step is larger: half of a small second-level cache

bool read_whole(int descriptor, int64_t at, int64_t count, uint8_t* to) {
#ifndef _WIN32
  return read_all(descriptor, at, to, static_cast<size_t>(count)) == 0;
#else
  return false;
#endif
}

/// Whether digits enumerate each of these elements once, judged by their sizes and the last offset.
bool are_all(int bits, const std::vector<Digit>& digits, int64_t bytes) {
  const int64_t all = bytes * 8 / bits;
  int64_t count = 1, last = 0;
  for (const Digit& digit : digits) {
    if (digit.size < 1 || digit.from < 0 || digit.size > all / count) return false;
    count *= digit.size;
    last += (digit.size - 1) * digit.from;
  }
  return bytes * 8 % bits == 0 && count == all && last == count - 1;
}

struct Shared {
  const FilePieces& pieces;
  uint8_t* scratch;
  int64_t piece;
  int threads;
  std::atomic<int64_t> next{0};
  std::atomic<int> entered{0};
  std::atomic<bool> failed{false};

  static void share(void* self) { static_cast<Shared*>(self)->work(); }

  void work() {
    const int thread = entered++;
    if (thread >= threads) return;
    for (int64_t i = next++; i < pieces.count() && !failed; i = next++)
      if (!pieces.move(i, scratch + thread * piece)) failed = true;
  }
};

}  // namespace

bool FilePieces::in_steps(const Plan& plan, Steps& steps) {
  if (!plan.width || plan.from_element || plan.to_element) return false;
  int64_t end = plan.width + *std::max_element(plan.from, plan.from + plan.registers);
  if (!plan.loops) {  // a single tile
    steps = {1, 1, end, 0};
    return true;
  }
  const Digit& outer = plan.loop[plan.loops - 1];
  for (int loop = 0; loop + 1 < plan.loops; ++loop) end += (plan.loop[loop].size - 1) * plan.loop[loop].from;
  steps = {outer.size, plan.tiles / outer.size, outer.from, outer.to};
  return end == outer.from;
}

FilePieces::FilePieces(const Kernels* kernels, std::vector<Plan> plans, const Steps& steps, const FileBytes& from,
                       uint8_t* to, int64_t together)
    : kernels_(kernels), plans_(std::move(plans)), steps_(steps), from_(from), to_(to), together_(together) {}

std::optional<FilePieces> FilePieces::of(const Kernels& kernels, int bits, const std::vector<Digit>& digits,
                                         const FileBytes& from, uint8_t* to, int64_t piece) {
  if (digits.empty()) return FilePieces(nullptr, {}, {from.count, 0, 1, 1}, from, to, kAtOnce);
  if (!are_all(bits, digits, from.count)) return {};
  std::vector<Plan> plans = make_plans(bits, digits, kernels.widest, Pace::kSource);
  Steps steps{};
  if (plans.size() == 1 && in_steps(plans[0], steps) && steps.bytes <= piece && steps.count * steps.bytes == from.count) {
    const int64_t together = std::max<int64_t>(1, std::min(piece, kAtOnce) / steps.bytes);
    return FilePieces(&kernels, std::move(plans), steps, from, to, together);
  }
  if (from.count > piece) return {};
  return FilePieces(&kernels, make_plans(bits, digits, kernels.widest), {1, 0, from.count, 0}, from, to, 1);
}

bool FilePieces::move(int64_t piece, uint8_t* scratch) const {
  const int64_t first = piece * together_, count = std::min(together_, steps_.count - first);
  uint8_t* const read = kernels_ ? scratch : to_ + first;
  if (!read_whole(from_.descriptor, from_.begin + first * steps_.bytes, count * steps_.bytes, read)) return false;
  if (!kernels_) return true;
  for (const Plan& plan : plans_) {
    const int64_t tiles = steps_.tiles ? count * steps_.tiles : plan.tiles;
    run_plan(*kernels_, plan, scratch, to_ + first * steps_.to, 0, tiles, from_.count >= kStreamBytes);
  }
  kernels_->fence();
  return true;
}

bool move_from_file(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const FileBytes& from,
                    uint8_t* to, uint8_t* scratch, int64_t piece, int threads) {
  const auto pieces = FilePieces::of(kernels, bits, digits, from, to, piece);
  if (!pieces) return false;
  Shared all{*pieces, scratch, piece, threads};
  if (threads <= 1)
    all.work();
  else
    on_threads(threads, Shared::share, &all);
  return !all.failed;
}

}  // namespace qload::cpu
