// Kinds of codes of a weight.
#pragma once

#include "../../shared/both.h"

namespace qload::cuda {

/// The last eight bits of a value are the width of the codes.
///
///     kUint4, kUint8                zero points and scales in x's type, by group
///     kInt8, kE4m3, kE5m2           numbers (int8 is stored plus 128); fp32 scales multiply sums
///     kE2m1, kNf4, kBnbFp4, kMxfp8  numbers; scales by group multiply operands (device/scaled_codes.cuh)
///
/// kBnbFp4 uses the kernels of kNf4.
enum class Code : int {
  kUint4 = 4, kUint8 = 8, kInt8 = 0x108, kE4m3 = 0x208, kE2m1 = 0x304, kNf4 = 0x404, kBnbFp4 = 0x504, kMxfp8 = 0x608, kE5m2 = 0x708
};

QLOAD_BOTH constexpr int bits_of(Code code) { return static_cast<int>(code) & 0xFF; }
QLOAD_BOTH constexpr bool is_number(Code code) { return static_cast<int>(code) > 0xFF; }
QLOAD_BOTH constexpr bool is_of_table(Code code) { return code == Code::kNf4 || code == Code::kBnbFp4; }
QLOAD_BOTH constexpr bool is_scaled(Code code) { return code == Code::kE2m1 || code == Code::kMxfp8 || is_of_table(code); }
/// Bits of a column in a row of zero points, or of the offsets in their place.
QLOAD_BOTH constexpr int zero_width(int bits, bool offsets, bool wide = false) { return !offsets ? bits : wide ? 32 : 16; }
/// Whether chips of 8.9 and newer have an instruction that converts these codes.
QLOAD_BOTH constexpr bool converts_e4m3(Code code) { return code == Code::kE4m3 || code == Code::kMxfp8; }

}  // namespace qload::cuda
