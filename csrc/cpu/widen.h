// Conversion of floats of any type to float32, `step` apart.
#pragma once

#include <cstdint>

#include "halves.h"

namespace qload::cpu {
namespace {

template <class S>
void widen(const void* from, Float type, int64_t count, float* to, int64_t step) {
  alignas(64) float values[S::kLanes];
  int64_t done = 0;
  for (; done + S::kLanes <= count; done += S::kLanes) {
    const auto wide = S::read(from, type, done);
    if (step == 1) {
      S::store(to + done, wide);
      continue;
    }
    S::store(values, wide);
    for (int i = 0; i < S::kLanes; ++i) to[(done + i) * step] = values[i];
  }
  for (; done < count; ++done) to[done * step] = read_one(from, type, done);
}

}  // namespace
}  // namespace qload::cpu
