// What the codes of a weight stand for.
#pragma once

#include "../../shared/both.h"

namespace qload::cuda {

/// The last eight bits of each are the width of its codes. Unsigned integers have zero points, and scales of x's type by
/// groups. Numbers are themselves, int8 plus 128 in its byte, and have scales in fp32 that multiply sums. Those of 4 bits
/// and kMxfp8, e4m3 too, have scales by groups too, which multiply operands (device/scaled_codes.cuh). Kernels of kNf4 are
/// those of kBnbFp4 too.
enum class Code : int {
  kUint4 = 4, kUint8 = 8, kInt8 = 0x108, kE4m3 = 0x208, kE2m1 = 0x304, kNf4 = 0x404, kBnbFp4 = 0x504, kMxfp8 = 0x608, kE5m2 = 0x708
};

QLOAD_BOTH constexpr int bits_of(Code code) { return static_cast<int>(code) & 0xFF; }
QLOAD_BOTH constexpr bool is_number(Code code) { return static_cast<int>(code) > 0xFF; }
QLOAD_BOTH constexpr bool is_of_table(Code code) { return code == Code::kNf4 || code == Code::kBnbFp4; }
QLOAD_BOTH constexpr bool is_scaled(Code code) { return code == Code::kE2m1 || code == Code::kMxfp8 || is_of_table(code); }
/// Whether an instruction of 8.9 and newer chips makes operands.
QLOAD_BOTH constexpr bool converts_e4m3(Code code) { return code == Code::kE4m3 || code == Code::kMxfp8; }

}  // namespace qload::cuda
