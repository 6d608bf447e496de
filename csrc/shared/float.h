// The types that codes are dequantized to, by the numbers that Python gives them.
#pragma once

namespace qload {

enum class Float : int { kFloat32, kFloat16, kBfloat16 };

}  // namespace qload
