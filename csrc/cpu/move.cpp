// A move of elements between two packed orders, on several threads.
//
//   to[sum digit * to_stride] = from[sum digit * from_stride]
//
// Threads share out the tiles of each plan, which write bytes of their own. What no register fits goes
// element by element: then a thread has whole bytes, for it has whole outermost digits.
#include "move.h"

#include <cstring>

#include "parallel.h"

namespace qload::cpu {
namespace {

template <class Word>
void put(const uint8_t* from, uint8_t* to, int64_t source, int64_t target) {
  std::memcpy(to + target * static_cast<int64_t>(sizeof(Word)), from + source * static_cast<int64_t>(sizeof(Word)),
              sizeof(Word));
}

void put_bits(int bits, const uint8_t* from, uint8_t* to, int64_t source, int64_t target) {
  const int64_t per = 8 / bits;
  const int mask = (1 << bits) - 1, shift = static_cast<int>(target % per) * bits;
  const int code = from[source / per] >> (source % per * bits) & mask;
  uint8_t& byte = to[target / per];
  byte = static_cast<uint8_t>((byte & ~(mask << shift)) | code << shift);
}

void run_elements(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) {
  int64_t at[kMostDigits], source = plan.from_element, target = plan.to_element, rest = begin;
  for (int d = plan.digits - 1; d >= 0; --d) {
    const Digit& digit = plan.digit[d];
    at[d] = rest % digit.size;
    rest /= digit.size;
    source += at[d] * digit.from;
    target += at[d] * digit.to;
  }
  for (int64_t count = begin; count < end; ++count) {
    switch (plan.bits) {
      case 8:
        put<uint8_t>(from, to, source, target);
        break;
      case 16:
        put<uint16_t>(from, to, source, target);
        break;
      case 32:
        put<uint32_t>(from, to, source, target);
        break;
      default:
        put_bits(plan.bits, from, to, source, target);
    }
    for (int d = plan.digits - 1; d >= 0; --d) {
      const Digit& digit = plan.digit[d];
      source += digit.from;
      target += digit.to;
      if (++at[d] < digit.size) break;
      source -= digit.from * digit.size;
      target -= digit.to * digit.size;
      at[d] = 0;
    }
  }
}

/// How many tiles, or elements, one thread has to keep together.
int64_t together(const Plan& plan) {
  if (plan.width || plan.digits == 0) return 1;
  return plan.digit[0].to * plan.bits % 8 ? plan.tiles : plan.tiles / plan.digit[0].size;
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
