// A move of elements between two packed orders, on several threads.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]
//
// Threads divide the tiles of each plan; each tile writes bytes of its own. Digits that fit no register are moved
// element by element: then each thread gets whole outermost digits, and so whole bytes.
#include "move.h"

#include "../shared/element.h"
#include "parallel.h"
#include "walk.h"

namespace qload::cpu {
namespace {

// Writes a code into its byte; the other elements of the byte keep their bits.
void put_code(int bits, uint32_t code, uint8_t* to, int64_t target) {
  const int64_t per_byte = 8 / bits;
  const int mask = (1 << bits) - 1, shift = static_cast<int>(target % per_byte) * bits;
  uint8_t& byte = to[target / per_byte];
  byte = static_cast<uint8_t>((byte & ~(mask << shift)) | static_cast<int>(code) << shift);
}

void run_elements(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) {
  Walk walk(plan.digit, plan.digits, begin);
  for (int64_t count = begin; count < end; ++count, walk.next()) {
    const int64_t source = plan.from_element + walk.from(), target = plan.to_element + walk.to();
    if (!copy_element(plan.bits, from, source, to, target))
      put_code(plan.bits, code_at(plan.bits, from, source), to, target);
  }
}

/// The smallest number of tiles, or elements, for one thread.
int64_t together(const Plan& plan) {
  if (plan.width || plan.digits == 0) return 1;
  const Digit& outermost = plan.digit[plan.digits - 1];
  return outermost.to * plan.bits % 8 ? plan.tiles : plan.tiles / outermost.size;
}

}  // namespace

void run_plan(const Kernels& kernels, const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin,
              int64_t end, bool stream) {
  if (!plan.width) return run_elements(plan, from, to, begin, end);
  to += plan.to_element * plan.bits / 8;
  const bool even = plan.even && reinterpret_cast<uintptr_t>(to) % static_cast<uintptr_t>(plan.width) == 0;
  kernels.run(plan, from + plan.from_element * plan.bits / 8, to, begin, end, stream && even);
}

void move(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const uint8_t* from, uint8_t* to,
          int threads) {
  for (const Plan& plan : make_plans(bits, digits, kernels.widest)) {
    const int64_t unit = together(plan);
    const int64_t bytes = plan.width ? plan.tiles * plan.registers * plan.width : plan.tiles * 8;
    const int64_t least = plan.tiles / unit * kLeastBytes / std::max<int64_t>(bytes, 1) + 1;
    parallel_for(plan.tiles / unit, least, threads, [&](int64_t begin, int64_t end) {
      run_plan(kernels, plan, from, to, begin * unit, end * unit, bytes >= kStreamBytes);
      kernels.fence();
    });
  }
}

}  // namespace qload::cpu
