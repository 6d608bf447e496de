// Scales and codes of one group of inputs: float32 operations in the order of qload/kernels/activations.py, with the
// rounding of torch on CUDA, where a tensor / number is the tensor times the reciprocal of the number.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "../device/number.cuh"
#include "quantize.h"

namespace qload::cuda {

struct Step {
  float step;     // value of a code of 1
  float inverse;  // factor of x if `times`; else x is divided by `step`
  float zero;
};

/// Kinds of codes: integers of `bits` bits, or floats.
enum class Kind : int { kWhole, kE4m3, kE2m1 };

// Limits of dequantized values, as in quantized_inputs.py: no code has more bits.
constexpr int kHalfRange = 8, kLeastExponent = -100, kCodeBits = 9;
constexpr float kEpsilon = 0x1p-23f;                  // replaces a scale of 0
constexpr float kMostE4m3 = 448, kLeastE4m3 = 0x1p-9f, kInsteadOfZero = 0.125f;  // of e4m3 scales

__device__ __forceinline__ float not_zero(float scale) { return scale == 0 ? kEpsilon : scale; }

/// NaN stays NaN.
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
    exponent = ceilf(log2f(__fmul_rn(largest, work.one_over_most)));
  }
  return exp2f(clamped(exponent, -127, 128));
}

/// Round to the nearest e4m3; NaN stays NaN.
__device__ __forceinline__ float to_e4m3(float value) {
  const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

/// Round to the nearest e2m1; the absolute value is at most 6.
__device__ __forceinline__ float to_e2m1(float value) {
  const float size = fabsf(value), unit = size < 2 ? 0.5f : size < 4 ? 1.0f : 2.0f;
  return rintf(value * (size < 2 ? 2.0f : size < 4 ? 1.0f : 0.5f)) * unit;
}

__device__ __forceinline__ float stored_number(const void* at, Stored type) {
  switch (type) {
    case Stored::kFloat16: return wide(*static_cast<const __half*>(at));
    case Stored::kBfloat16: return wide(*static_cast<const __nv_bfloat16*>(at));
    case Stored::kInt8: return *static_cast<const int8_t*>(at);
    default: return *static_cast<const float*>(at);
  }
}

/// The stored scale of the block's token. An earlier kernel wrote scales of tokens, so they are read from the L2.
__device__ __forceinline__ float stored_scale(const Quantizing& work) {
  return work.scale_each ? __ldcg(static_cast<const float*>(work.scale) + blockIdx.x) : stored_number(work.scale, work.scale_type);
}

/// `high`: bits of the largest absolute input; for kAsymmetric of the largest input, with `low` for the largest of -x.
__device__ __forceinline__ Step step_of(const Quantizing& work, uint32_t low, uint32_t high) {
  float largest = __uint_as_float(high);
  if (work.bounded) largest = clamped(largest, -work.bound, work.bound);
  switch (work.finding) {
    case Finding::kStored:
      return {stored_scale(work), 0, work.zero ? stored_number(work.zero, work.zero_type) : 0};
    case Finding::kAsymmetric: {
      const float below = __uint_as_float(low), least = static_cast<float>(-(1 << (work.bits - 1)));
      const float scale = __fmul_rn(__fadd_rn(largest, below), work.one_over_most);
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
    case Finding::kE4m3Over: {
      const float stored = work.scale ? stored_scale(work) : 1, scale = __fmul_rn(stored, __fmul_rn(largest, work.one_over_most));
      const float found = to_e4m3(scale > kMostE4m3 ? kMostE4m3 : scale);
      return {__fdiv_rn(found == 0 ? kInsteadOfZero : found, stored), 0, 0};
    }
    case Finding::kE4m3Times: {
      const float stored = stored_scale(work), scale = __fdiv_rn(largest, __fmul_rn(work.most, stored));
      return {__fmul_rn(to_e4m3(clamped(scale == 0 ? 1 : scale, kLeastE4m3, kMostE4m3)), stored), 0, 0};
    }
    case Finding::kLargest:
      return {not_zero(__fmul_rn(largest, work.one_over_most)), 0, 0};
    default:
      return {power_of_two(work, largest), 0, 0};
  }
}

/// Not inlined: rare and long.
__device__ __noinline__ float divide(float x, float step) { return __fdiv_rn(x, step); }

/// Quotients of eight inputs and a step, rounded as IEEE requires: one reciprocal, and two corrections by the remainder
/// for each quotient. If a remainder could underflow or overflow, the division is done one by one.
__device__ __forceinline__ void divide(float step, const float (&x)[8], float (&quotients)[8]) {
  if (!(step >= 0x1p-90f && step <= 0x1p90f)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) quotients[i] = divide(x[i], step);
    return;
  }
  const float reciprocal = __frcp_rn(step);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float first = __fmul_rn(x[i], reciprocal);
    const float second = fmaf(fmaf(-first, step, x[i]), reciprocal, first);
    const float third = fmaf(fmaf(-second, step, x[i]), reciprocal, second);
    quotients[i] = fabsf(first) < 0x1p24f ? third : first;  // else it exceeds all codes, or is NaN
  }
}

/// Round two numbers to the nearest e4m3, saturating; NaN stays NaN.
__device__ __forceinline__ float2 to_e4m3(float2 values) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(__nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
  return __half22float2(__half2(halves));
}

/// Codes of eight inputs as floats; without `rounds`, e4m3 before rounding.
template <Kind kind>
__device__ __forceinline__ void code(const Quantizing& work, const Step& step, const float (&x)[8], bool rounds,
                                     float (&codes)[8]) {
  if (work.finding == Finding::kInverse || work.finding == Finding::kInverseOne) {
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = __fmul_rn(x[i], step.inverse);
  } else {
    divide(step.step, x, codes);
  }
  const float half = kind == Kind::kWhole ? static_cast<float>(1 << (work.bits - 1)) : 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 two = {__fadd_rn(codes[i], step.zero), __fadd_rn(codes[i + 1], step.zero)};  // -0 + 0 is 0, so the code is 0
    if constexpr (kind == Kind::kE4m3) {
      const float2 found = rounds ? to_e4m3(two) : two;
      codes[i] = found.x, codes[i + 1] = found.y;
    } else if constexpr (kind == Kind::kWhole) {
      codes[i] = rintf(clamped(two.x, -half, half - 1)), codes[i + 1] = rintf(clamped(two.y, -half, half - 1));
    } else {
      codes[i] = to_e2m1(clamped(two.x, -work.most, work.most)), codes[i + 1] = to_e2m1(clamped(two.y, -work.most, work.most));
    }
  }
}

/// A power of two that reduces all values of a token below 2**kHalfRange; `step`: the largest of its groups.
__device__ __forceinline__ float power_above(float step) {
  int exponent;
  frexpf(step, &exponent);
  return exp2f(static_cast<float>(max(exponent + kCodeBits - kHalfRange, kLeastExponent)));
}

}  // namespace qload::cuda
