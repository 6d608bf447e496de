// A move of elements whose source lies in a file.
//
//   to[sum digit * to_stride] = file[sum digit * from_stride]
//
// Threads take pieces of the source one after another, each some steps of the plan's outermost loop. A piece is
// read to memory of the thread's own, which is always the same and stays in its second-level cache, and goes from
// there to where it belongs. So memory sees what a copy of the file would show it: each byte read once and
// written once. A step that is larger than such a piece is one by itself, as far as the memory holds it. A file
// that is cut short meanwhile ends a read early, where a memory map would end the process.
//
// Equals `move` (move.cpp) of the same bytes, bit for bit.
#include "file_move.h"

#include <algorithm>
#include <atomic>

#include "move.h"
#include "team.h"

#ifndef _WIN32
#include <cerrno>

#include <sys/types.h>
#include <unistd.h>
#endif

namespace qload::cpu {
namespace {

constexpr int64_t kAtOnce = 1 << 19;  // bytes of a piece, where a step has no more: half of a small second-level cache

bool read_whole(int descriptor, int64_t at, int64_t count, uint8_t* to) {
#ifndef _WIN32
  while (count > 0) {
    const ssize_t got = pread(descriptor, to, static_cast<size_t>(count), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got, to += got, count -= got;
  }
  return true;
#else
  return false;
#endif
}

/// Steps of a plan's outermost loop, which lie in the source one behind another.
struct Steps {
  int64_t count, tiles, bytes;  // of a step
  int64_t to;                   // between steps
};

/// Whether a plan can be carried out step by step, and how.
bool in_steps(const Plan& plan, Steps& steps) {
  if (!plan.width || plan.from_element || plan.to_element) return false;
  int64_t end = plan.width + *std::max_element(plan.from, plan.from + plan.registers);
  if (!plan.loops) {  // one tile
    steps = {1, 1, end, 0};
    return true;
  }
  const Digit& outer = plan.loop[plan.loops - 1];
  for (int loop = 0; loop + 1 < plan.loops; ++loop) end += (plan.loop[loop].size - 1) * plan.loop[loop].from;
  steps = {outer.size, plan.tiles / outer.size, outer.from, outer.to};
  return end == outer.from;
}

struct Shared {
  const Kernels& kernels;
  const Plan& plan;
  const Steps& steps;
  const FileBytes& from;
  uint8_t *to, *scratch;
  int64_t piece, together;  // bytes, and steps of a piece
  int threads;
  bool stream;
  std::atomic<int64_t> next{0};
  std::atomic<int> entered{0};
  std::atomic<bool> failed{false};

  static void share(void* self) { static_cast<Shared*>(self)->work(); }

  void work() {
    const int thread = entered++;
    if (thread >= threads) return;
    uint8_t* const own = scratch + thread * piece;
    for (int64_t first = next++ * together; first < steps.count && !failed; first = next++ * together) {
      const int64_t count = std::min(together, steps.count - first);
      if (!read_whole(from.descriptor, from.begin + first * steps.bytes, count * steps.bytes, own)) {
        failed = true;
        break;
      }
      kernels.run(plan, own, to + first * steps.to, 0, count * steps.tiles, stream);
    }
    kernels.fence();
  }
};

}  // namespace

bool move_from_file(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const FileBytes& from,
                    uint8_t* to, uint8_t* scratch, int64_t piece, int threads) {
  const std::vector<Plan> plans = make_plans(bits, digits, kernels.widest, Pace::kSource);
  Steps steps{};
  if (plans.size() != 1 || !in_steps(plans[0], steps)) return false;
  if (steps.bytes > piece || steps.count * steps.bytes != from.count) return false;
  const Plan& plan = plans[0];
  const bool even = plan.even && reinterpret_cast<uintptr_t>(to) % static_cast<uintptr_t>(plan.width) == 0;
  const int64_t together = std::max<int64_t>(1, std::min(piece, kAtOnce) / steps.bytes);
  Shared all{kernels, plan, steps, from, to, scratch, piece, together, threads, even && from.count >= kStreamBytes};
  if (threads <= 1)
    all.work();
  else
    on_threads(threads, Shared::share, &all);
  return !all.failed;
}

}  // namespace qload::cpu
