// Products of x and a quantized weight.
#include <array>

#include "../decode/decode.h"
#include "../exllama/exllama.h"
#include "../exllama/rounded.h"
#include "../gather/gather.h"
#include "../many/many.h"
#include "../mma/mma.h"
#include "common.h"

namespace qload::cuda {

void add_linears(py::module_& module) {
  module.def(
      "decode",
      [](const std::array<int, 5>& sizes, int code, int group, int offset_zero, bool wide, bool own, bool bfloat16,
         int columns, int split, bool early) {
        return launch_of("decode", [=](const Operands& in, CUstream_st* stream) {
          const auto [M, K, N, inputs, outputs] = sizes;
          return decode({in.x, in.weights, in.scales, in.zeros, in.g_idx, nullptr, in.bias, in.token_scales, in.y, M, K, N,
                         inputs, outputs, Code{code}, group, offset_zero, wide, own, bfloat16, columns, split, early},
                        stream);
        });
      },
      "Launches x times a 4-bit or 8-bit weight in Marlin's order or our own; sizes: M, K, N, inputs, outputs; code: as "
      "device/code.h numbers them; offset_zero: the zero point of codes with offsets in place of zeros; -1: none; "
      "wide: scales and offsets are fp32.");
  const auto many_of = [](const char* name, bool coded) {
    return [=](const std::array<int, 5>& sizes, int code, int group, int offset_zero, bool bfloat16,
               const std::array<int, 6>& division, bool early) {
      return launch_of(name, [=](const Operands& in, CUstream_st* stream) {
        const auto [M, K, N, inputs, outputs] = sizes;
        const auto [tokens, columns, pairs, slices, neighbours, teams] = division;
        return many({in.x, in.weights, in.scales, in.zeros, in.bias, in.token_scales, in.y, in.parts, M, K, N, inputs,
                     outputs, Code{code}, group, offset_zero, bfloat16, coded, tokens, columns, teams, pairs != 0, slices, neighbours != 0, early, nullptr, 0, 0},
                    stream);
      });
    };
  };
  module.def(
      "many", many_of("many", false),
      "Launches tokens, best from 17 on, times a weight in strips; sizes: M, K, N, inputs, outputs. division: tokens "
      "and columns of a block, whether two share K, slices of K, whose sums `parts` gets in fp32, whether neighbours fetch x "
      "for each other; both: two share K in a last turn that has tiles for half of the places; teams of warps.");
  module.def("w8a8", many_of("w8a8", true),
             "Launches codes of 8 bits times a weight of such codes in strips; arguments as for `many`.");
  module.def(
      "mma",
      [](const std::array<int, 5>& sizes, int code, int group, int offset_zero, bool wide, bool bfloat16,
         const std::array<int, 4>& division, bool early) {
        return launch_of("mma", [=](const Operands& in, CUstream_st* stream) {
          const auto [M, K, N, inputs, outputs] = sizes;
          const auto [tokens, columns, row_warps, slices] = division;
          return mma({in.x, in.weights, in.scales, in.zeros, in.bias, in.token_scales, in.y, in.parts, M, K, N, inputs,
                      outputs, Code{code}, group, offset_zero, wide, bfloat16, tokens, columns, row_warps, slices, early},
                     stream);
        });
      },
      "Launches tokens, best from 17 on, times a weight in strips, from Ampere on; sizes: M, K, N, inputs, outputs. "
      "division: tokens of a warp, tiles of 64 columns of a block, warps that share the rows of each, slices of K, whose "
      "sums `parts` gets in fp32.");
  module.def(
      "exllama",
      [](uintptr_t x, uintptr_t weights, uintptr_t zeros, uintptr_t scales, uintptr_t g_idx, uintptr_t perm,
         uintptr_t bias, uintptr_t y, const std::array<int, 4>& sizes, int bits, int group,
         const std::array<int, 3>& zero, bool bfloat16, int columns, int split, bool early, uintptr_t stream) {
        const auto [M, K, N, groups] = sizes;
        check(exllama({at<const void>(x), at<const void>(weights), at<const void>(zeros), at<const void>(scales),
                       at<const int32_t>(g_idx), at<const int32_t>(perm), at<const void>(bias), at<void>(y), M, K, N,
                       groups, bits, group, static_cast<uint32_t>(zero[0]), static_cast<uint32_t>(zero[2]), zero[1],
                       bfloat16, columns, split, early},
                      at<CUstream_st>(stream)),
              "exllama");
      },
      "x times a weight in ExLlama's order; sizes: M, K, N, groups; zero: added to a word, to a field, its mask.");
  module.def(
      "rounded_three",
      [](uintptr_t weights, uintptr_t zeros, uintptr_t scales, uintptr_t g_idx, uintptr_t w,
         const std::array<int, 4>& sizes, const std::array<int, 3>& zero, bool bfloat16, uintptr_t stream) {
        const auto [K, N, first, columns] = sizes;
        check(rounded_three({at<const void>(weights), at<const void>(zeros), at<const void>(scales),
                             at<const int32_t>(g_idx), at<void>(w), K, N, first, columns,
                             static_cast<uint32_t>(zero[2]), zero[1], bfloat16},
                            at<CUstream_st>(stream)),
              "rounded_three");
      },
      "Columns of a weight of 3 bits in ExLlama's order as numbers; sizes: K, N, first, columns; zero: as for exllama.");
  module.def(
      "gather_inputs",
      [](uintptr_t x, uintptr_t perm, uintptr_t y, const std::array<int, 3>& sizes, bool staged, bool early,
         uintptr_t stream) {
        const auto [M, inputs, rows] = sizes;
        check(gather_inputs({at<const void>(x), at<const int32_t>(perm), at<void>(y), M, inputs, rows, staged, early},
                            at<CUstream_st>(stream)),
              "gather_inputs");
      },
      "16-bit inputs of each token in another order; sizes: M, inputs, rows.");
}

}  // namespace qload::cuda
