// The kernels for any machine.
#include "expand.h"
#include "kernels.h"
#include "narrow.h"
#include "network.h"
#include "vector_scalar.h"

namespace qload::cpu {
namespace {

struct Plain {
  template <class Word>
  static void table(const Meaning& m, const float* all, int64_t group, Word* table) {
    alignas(64) float values[kValues];
    std::memcpy(values, all, sizeof values);
    mean(m, group, kValues, values);
    if constexpr (sizeof(Word) == 4)
      std::memcpy(table, values, sizeof values);
    else
      round_halves<Plain>(values, kValues, m.out, table);
  }
  template <class Word>
  static int64_t look_up(const uint8_t*, bool, int64_t, const Word*, Word*, bool) {
    return 0;
  }
  static int64_t spread(const uint8_t*, int64_t, uint8_t*) { return 0; }
  static int64_t halves(const float*, int64_t, uint16_t*) { return 0; }
  static int64_t narrow(const int32_t*, int64_t, int, uint8_t*, uint32_t&) { return 0; }
  static void copy(const uint8_t* from, uint8_t* to, int64_t bytes, bool) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
};

void run_any(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream) {
  if (plan.width == 8) return run<Scalar8>(plan, from, to, begin, end, stream);
  run<Scalar4>(plan, from, to, begin, end, stream);
}

void fence() {}

}  // namespace

extern const Kernels kScalarKernels;
const Kernels kScalarKernels{8, run_any, narrow<Plain>, widen, fields, expand<Plain>, Plain::copy, fence,
                             &kScalarProducts, code_dots_scalar, nullptr};

}  // namespace qload::cpu
