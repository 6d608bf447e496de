// The activation between an expert's products: act(gate) * up. Equals `GatedActivation` in fp32.
#pragma once

#include "experts.h"

namespace qload::cuda {

__device__ __forceinline__ float gated(const Gate& gate, float a, float b) {
  switch (gate.kind) {
    case 0:
      return a / (1 + expf(-a)) * b;
    case 1:
      return 0.5f * a * (1 + erff(a * 0.70710678f)) * b;
    case 2:
      return 0.5f * a * (1 + tanhf(0.79788456f * (a + 0.044715f * a * a * a))) * b;
    default:  // comparisons that keep NaN
      a = a > gate.limit ? gate.limit : a;
      b = b > gate.limit ? gate.limit : b < -gate.limit ? -gate.limit : b;
      return (b + 1) * (a / (1 + expf(-gate.alpha * a)));
  }
}

}  // namespace qload::cuda
