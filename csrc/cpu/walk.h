// A walk through nested loops from any number on: elements of a move, or tiles of a plan.
#pragma once

#include <cstdint>

#include "../shared/loops.h"
#include "plan.h"

namespace qload::cpu {
namespace {

class Walk {
 public:
  /// `loops`: at most kMostDigits, innermost first; the caller keeps them valid.
  Walk(const Digit* loops, int count, int64_t number)
      : loops_(loops), count_(count), here_(offsets_of(loops, count, number, at_)) {}

  int64_t from() const { return here_.from; }
  int64_t to() const { return here_.to; }

  void next() {
    for (int l = 0; l < count_; ++l) {
      const Digit& loop = loops_[l];
      here_.from += loop.from;
      here_.to += loop.to;
      if (++at_[l] < loop.size) return;
      here_.from -= loop.from * loop.size;
      here_.to -= loop.to * loop.size;
      at_[l] = 0;
    }
  }

 private:
  const Digit* loops_;
  int count_;
  int64_t at_[kMostDigits];
  Offsets here_;
};

}  // namespace
}  // namespace qload::cpu
