// Meaning of codes for a kernel. Pointers are integers, as Python passes them.
//
//   w[n, k] = (value(code) - zero) * scale * factor - offset
//             scale, zero and offset at (group of n, group of k)
#pragma once

#include <cstdint>

#include "../../shared/float.h"

namespace qload::cuda {

enum class Zeros : int { kNone, kConstant, kWords, kInt32 };
enum class Values : int { kNumbers, kE4m3, kE5m2, kE2m1, kSigned4 };  // kinds of codes; kSigned4: two's complement
constexpr int kE8m0 = 3;  // a further type of scales beside those of Float: exponents, one byte each

struct Meaning {
  uintptr_t lookup = 0;  // fp32 (2**bits,), the value of each code; 0: the code itself
  uintptr_t scales = 0;
  int scale_type = 0;  // Float, or kE8m0 for dequantize_rows
  int64_t scale_n = 0, scale_k = 0;  // strides of a group, in elements
  uint32_t scale_places = 0x543210;    // hex digit i: position of bit i of a group of n in a kernel's order
  uintptr_t offsets = 0;  // of the type and strides of scales; 0: no offsets. For dequantize
  uint32_t offset_places = 0x543210;  // as scale_places
  int zeros_kind = 0;  // Zeros
  int zero = 0;        // kConstant: the common zero point
  uintptr_t zeros = 0;
  int64_t zero_n = 0, zero_k = 0;
  uint32_t zero_places = 0x543210;  // as scale_places
  int zero_bits = 4;       // kWords: fields of int32 words, numbered by the strides
  uint32_t zero_word = 0;  // added to a whole word
  int zero_add = 0;        // added to a field
  int zero_mask = -1;      // bits of a field
  uintptr_t n_table = 0, k_table = 0;  // int32, group of each output or input; 0: n / n_run, k / k_run
  int64_t n_run = 1, k_run = 1;
  int k_shift = -1;  // k / k_run as a shift; set by the launch
  int values = 0;  // Values without a lookup; for dequantize_rows
  uintptr_t factors = 0;  // fp32 (K,), multiplied before the last rounding; for dequantize_rows
  bool divide = false;  // divide by the scale
  float factor = 1;
};

}  // namespace qload::cuda
