// The output types of dequantization, with the numbers of Python's side.
#pragma once

namespace qload {

enum class Float : int { kFloat32, kFloat16, kBfloat16 };

}  // namespace qload
