// Scales and codes of one group of inputs: float32 operations in the order of qload/kernels/activations.py as torch
// carries them out on CUDA, where a tensor over a number is the tensor times the number's reciprocal.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "../device/number.cuh"
#include "quantize.h"

namespace qload::cuda {

struct Step {
  float step;     // what a code of 1 stands for
  float inverse;  // by which x is multiplied, where `times`; else x is divided by `step`
  float zero;
};

constexpr int kHalfRange = 8, kLeastExponent = -100;  // of what tokens are divided by, as scaled.py has them
constexpr float kEpsilon = 0x1p-23f;                  // instead of a scale of 0

__device__ __forceinline__ float not_zero(float scale) { return scale == 0 ? kEpsilon : scale; }

/// NaN stays.
__device__ __forceinline__ float clamped(float value, float low, float high) {
  return value != value ? value : fminf(fmaxf(value, low), high);
}

__device__ __forceinline__ float power_of_two(const Quantizing& work, float largest) {
  if (!(fabsf(largest) < __int_as_float(0x7F800000))) return largest;  // infinite, or NaN
  float exponent = -127;
  if (work.finding == Finding::kPowersNear) {
    int found;
    const float significand = frexpf(largest, &found);
    if (largest != 0) exponent = static_cast<float>(found - 1 + (significand >= 0.875f) - ilogbf(work.most));
  } else if (largest != 0) {
    exponent = ceilf(log2f(__fmul_rn(largest, __fdiv_rn(1.0f, work.most))));
  }
  return exp2f(clamped(exponent, -127, 128));
}

/// `high`: the bits of the largest absolute input; of kAsymmetric of the largest input, `low` of the largest below 0.
__device__ __forceinline__ Step step_of(const Quantizing& work, uint32_t low, uint32_t high) {
  float largest = __uint_as_float(high);
  if (work.bounded) largest = clamped(largest, -work.bound, work.bound);
  switch (work.finding) {
    case Finding::kStored:
      return {*work.scale, 0, work.zero ? *work.zero : 0};
    case Finding::kAsymmetric: {
      const float below = __uint_as_float(low), least = static_cast<float>(-(1 << (work.bits - 1)));
      const float scale = __fmul_rn(__fadd_rn(largest, below), __fdiv_rn(1.0f, work.most));
      const float zero = rintf(clamped(__fadd_rn(least, __fdiv_rn(below, scale)), least, -least - 1));
      return {not_zero(scale), 0, scale == 0 ? 0 : zero};
    }
    case Finding::kInverse:
    case Finding::kInverseOne: {
      float least = largest != largest ? largest : fmaxf(largest, 1e-12f);
      if (work.finding == Finding::kInverseOne) least = largest <= 0x1p-24f ? 1 : largest;
      const float inverse = __fmul_rn(__fdiv_rn(1.0f, least), work.most);
      return {__fdiv_rn(1.0f, inverse), inverse, 0};
    }
    case Finding::kLargest:
      return {not_zero(__fmul_rn(largest, __fdiv_rn(1.0f, work.most))), 0, 0};
    default:
      return {power_of_two(work, largest), 0, 0};
  }
}

/// What is rounded to the code of an input: of whole numbers the code itself, of floats as far as it saturates.
__device__ __forceinline__ float nearly_code(const Quantizing& work, const Step& step, float x) {
  const bool times = work.finding == Finding::kInverse || work.finding == Finding::kInverseOne;
  const float exact = __fadd_rn(times ? __fmul_rn(x, step.inverse) : __fdiv_rn(x, step.step), step.zero);
  if (!work.whole) return clamped(exact, -work.most, work.most);
  const auto half = static_cast<float>(1 << (work.bits - 1));
  return rintf(clamped(exact, -half, half - 1));
}

/// The code of an input as the number that it is.
__device__ __forceinline__ float code_of(const Quantizing& work, const Step& step, float x) {
  const float held = nearly_code(work, step, x);
  if (work.whole || held != held) return held;
  const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(held, __NV_SATFINITE, __NV_E4M3);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

/// A power of two that brings a token below 2**kHalfRange.
__device__ __forceinline__ float power_below(float largest) {
  int exponent;
  frexpf(largest, &exponent);
  return exp2f(static_cast<float>(max(exponent - kHalfRange, kLeastExponent)));
}

}  // namespace qload::cuda
