// Launches of move.cuh: the kernel for a plan.
#include "move.h"

#include <algorithm>

#include "move.cuh"

namespace qload::cuda {
namespace {

constexpr int kLeastRegisterBits = 4;  // number of loads in flight, as a power of two
constexpr int kGatherRegisterBits = 2;
constexpr int64_t kMostBlocks = 1 << 16;

template <int register_bits, bool runs, class Unit>
void launch(const Plan& plan, const void* from, void* to, cudaStream_t stream) {
  move_tiles<register_bits, runs, Unit><<<static_cast<unsigned>(plan.blocks), 1 << plan.thread_bits, 0, stream>>>(
      plan, static_cast<const Unit*>(from), static_cast<Unit*>(to));
}

template <int register_bits>
void launch_units(const Plan& plan, const void* from, void* to, cudaStream_t stream) {
  if (plan.unit == 4 && plan.run == 16) return launch<register_bits, true, uint32_t>(plan, from, to, stream);
  if (plan.unit == 4) return launch<register_bits, false, uint32_t>(plan, from, to, stream);
  if (plan.unit == 2) return launch<register_bits, false, uint16_t>(plan, from, to, stream);
  launch<register_bits, false, uint8_t>(plan, from, to, stream);
}

template <bool runs>
void launch_gather(const Plan& plan, const Look& look, int bits, const void* from, const int64_t* rows, void* to,
                   cudaStream_t stream) {
  gather_tiles<3, runs><<<static_cast<unsigned>(plan.blocks), 1 << plan.thread_bits, 0, stream>>>(
      plan, look, bits, static_cast<const uint32_t*>(from), rows, static_cast<uint32_t*>(to));
}

template <bool runs>
void launch_units_of_rows(const Plan& plan, const Look& look, int bits, const void* from, const int64_t* rows, void* to,
                          cudaStream_t stream) {
  gather_units<kLeastRegisterBits, runs><<<static_cast<unsigned>(plan.blocks), 1 << plan.thread_bits, 0, stream>>>(
      plan, look, bits, log2_of(32 / bits), static_cast<const uint32_t*>(from), rows, static_cast<uint32_t*>(to));
}

cudaError_t by_element(int bits, const std::vector<Digit>& all, const void* from, const int64_t* rows, void* to,
                       cudaStream_t stream) {
  Digits digits{};
  int64_t count = 1;
  if (all.size() > sizeof digits.digit / sizeof digits.digit[0]) return cudaErrorInvalidValue;
  for (const Digit& digit : all) {
    digits.digit[digits.count] = digit;
    if (rows && digit.row) digits.digit[digits.count].from = 0;
    ++digits.count;
    count *= digit.size;
  }
  const int64_t blocks = std::min(kMostBlocks, (count + kThreads - 1) / kThreads);
  move_elements<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(digits, bits, count, from, rows, to);
  return cudaGetLastError();
}

}  // namespace

cudaError_t move(int bits, const std::vector<Digit>& digits, const void* from, const int64_t* rows, void* to,
                 cudaStream_t stream) {
  bool empty = false;
  const std::vector<Digit> all = merged(digits, empty);
  if (empty) return cudaSuccess;
  const auto a = reinterpret_cast<uintptr_t>(from), b = reinterpret_cast<uintptr_t>(to);
  Plan plan;
  Look look;
  if (rows && make_plan(bits, all, a, b, kLeastRegisterBits, plan, 5, &look) && look.whole &&
      plan.register_bits <= kLeastRegisterBits) {
    if (plan.run == 16)
      launch_units_of_rows<true>(plan, look, bits, from, rows, to, stream);
    else
      launch_units_of_rows<false>(plan, look, bits, from, rows, to, stream);
    return cudaGetLastError();
  }
  if (rows) {
    if (!make_plan(bits, all, a, b, kGatherRegisterBits, plan, 5, &look) || plan.register_bits > 3)
      return by_element(bits, all, from, rows, to, stream);
    if (plan.run == 16)
      launch_gather<true>(plan, look, bits, from, rows, to, stream);
    else
      launch_gather<false>(plan, look, bits, from, rows, to, stream);
    return cudaGetLastError();
  }
  if (!make_plan(bits, all, a, b, kLeastRegisterBits, plan) || plan.register_bits > 4)
    return by_element(bits, all, from, nullptr, to, stream);
  if (plan.register_bits <= 3)
    launch_units<3>(plan, from, to, stream);
  else
    launch_units<4>(plan, from, to, stream);
  return cudaGetLastError();
}

}  // namespace qload::cuda
