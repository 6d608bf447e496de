// Routed experts.
#include <array>
#include <tuple>

#include "../experts/experts.h"
#include "../gather/gather.h"
#include "../many/many.h"
#include "common.h"

namespace qload::cuda {

void add_experts(py::module_& module) {
  module.def(
      "sort_by_expert",
      [](uintptr_t ids, uintptr_t map, bool wide, uintptr_t order, uintptr_t places, uintptr_t items,
         const std::array<int, 5>& sizes, uintptr_t stream) {
        const auto [pairs, total, experts, tokens, most_items] = sizes;
        check(sort_by_expert({{at<const void>(ids), at<const int32_t>(map), wide, pairs, total, experts},
                              at<int32_t>(order), at<int32_t>(places), at<void>(items), tokens, most_items},
                             at<CUstream_st>(stream)),
              "sort_by_expert");
      },
      "Pairs of a token and an expert it chose, by expert; sizes: pairs, all experts, those here, tokens of an item, items.");
  module.def(
      "experts",
      [](const std::array<uintptr_t, 2>& choice, bool wide, uintptr_t items, uintptr_t x, uintptr_t weights,
         uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t factors, uintptr_t y,
         const std::array<int, 4>& counts, const std::array<int, 6>& sizes, int code, int group, bool bfloat16,
         const std::array<int, 3>& division, const std::tuple<int, float, float>& gate, bool row_factors, bool known,
         bool early, uintptr_t stream) {
        const auto [pairs, total, experts, most_items] = counts;
        const auto [sharing, pitch, inputs, K, N, outputs] = sizes;
        const auto [tokens, columns, row_warps] = division;
        const auto [kind, alpha, limit] = gate;
        check(multiply_experts(
                  {{at<const void>(choice[0]), at<const int32_t>(choice[1]), wide, pairs, total, experts},
                   at<const void>(x), at<const void>(weights), at<const void>(scales), at<const void>(zeros),
                   at<const void>(bias), at<const float>(factors), at<const void>(items), at<void>(y), most_items, sharing, pitch,
                   inputs, K, N, outputs, Code{code}, group, tokens, columns, row_warps, bfloat16, kind >= 0, row_factors,
                   {kind, alpha, limit}, known, early},
                  at<CUstream_st>(stream)),
              "experts");
      },
      "x times the weights of the experts that tokens chose, few tokens each. choice: ids, map; counts: pairs, "
      "all experts, those here, items; sizes: pairs that share a row of x, pitch of y, inputs, K, N, outputs; division: tokens of "
      "a turn, tiles of a block, warps that share K; gate: kind, -1 for none, alpha, limit; row_factors: factors are of rows of x.");
  module.def(
      "gather_rows",
      [](const std::array<uintptr_t, 3>& choice, bool wide, uintptr_t x, uintptr_t perm, uintptr_t factors, uintptr_t to,
         const std::array<int, 3>& counts, const std::array<int, 4>& sizes, bool bfloat16, bool early, uintptr_t stream) {
        const auto [pairs, total, experts] = counts;
        const auto [rows, sharing, inputs, K] = sizes;
        check(gather_rows({{at<const void>(choice[0]), at<const int32_t>(choice[1]), wide, pairs, total, experts},
                           at<const void>(x), at<const int32_t>(perm), at<const float>(factors),
                           at<const int32_t>(choice[2]), at<void>(to), rows, sharing, inputs, K, bfloat16, early},
                          at<CUstream_st>(stream)),
              "gather_rows");
      },
      "Rows of x as the rows of experts are ordered; counts: pairs, all experts, those here; sizes: rows, pairs that "
      "share a row of x, its inputs, K.");
  module.def(
      "spread_values",
      [](const std::array<uintptr_t, 3>& choice, bool wide, const std::array<uintptr_t, 2>& values, uintptr_t to,
         const std::array<int, 3>& counts, int rows, bool early, uintptr_t stream) {
        const auto [pairs, total, experts] = counts;
        check(spread_values({{at<const void>(choice[0]), at<const int32_t>(choice[1]), wide, pairs, total, experts},
                             {at<const float>(values[0]), at<const float>(values[1])}, at<const int32_t>(choice[2]),
                             at<float>(to), rows, early},
                            at<CUstream_st>(stream)),
              "spread_values");
      },
      "Copies two values of each row's expert to the row; counts: pairs, all experts, those here.");
  module.def(
      "gate_rows",
      [](const std::array<uintptr_t, 3>& choice, bool wide, uintptr_t x, uintptr_t y, const std::array<int, 3>& counts,
         const std::array<int, 3>& sizes, bool bfloat16, bool in_fp32, const std::tuple<int, float, float>& gate,
         bool early, uintptr_t stream) {
        const auto [pairs, total, experts] = counts;
        const auto [rows, columns, pitch] = sizes;
        const auto [kind, alpha, limit] = gate;
        check(gate_rows({{at<const void>(choice[0]), at<const int32_t>(choice[1]), wide, pairs, total, experts},
                         at<const void>(x), at<const int32_t>(choice[2]), at<void>(y), rows, columns, pitch, bfloat16,
                         in_fp32, {kind, alpha, limit}, early},
                        at<CUstream_st>(stream)),
              "gate_rows");
      },
      "Gate and up of each row become one; sizes: rows, columns of one, pitch of y.");
  module.def(
      "combine_choices",
      [](const std::array<uintptr_t, 3>& choice, bool wide, uintptr_t x, uintptr_t weights, uintptr_t y,
         const std::array<int, 3>& counts, const std::array<int, 3>& sizes, bool bfloat16, bool in_fp32, bool early,
         uintptr_t stream) {
        const auto [pairs, total, experts] = counts;
        const auto [tokens, top, columns] = sizes;
        check(combine_choices({{at<const void>(choice[0]), at<const int32_t>(choice[1]), wide, pairs, total, experts},
                               at<const void>(x), at<const float>(weights), at<const int32_t>(choice[2]), at<void>(y),
                               tokens, top, columns, bfloat16, in_fp32, early},
                              at<CUstream_st>(stream)),
              "combine_choices");
      },
      "The sum of a token's choices, each times its weight; choice: ids, map, the row of each pair; sizes: tokens, "
      "choices of each, columns.");
  module.def(
      "many_experts",
      [](uintptr_t x, uintptr_t weights, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t factors, uintptr_t y,
         uintptr_t items, const std::array<int, 5>& sizes, const std::array<int, 2>& counts, int code, int group, bool bfloat16,
         const std::array<int, 4>& division, bool early, uintptr_t stream) {
        const auto [M, K, N, inputs, outputs] = sizes;
        const auto [experts, most_items] = counts;
        const auto [tokens, columns, pairs, turns] = division;
        check(many({at<const void>(x), at<const void>(weights), at<const void>(scales), at<const void>(zeros),
                    at<const void>(bias), at<const float>(factors), at<void>(y), nullptr, M, K, N, inputs, outputs, Code{code}, group, -1, bfloat16, false,
                    tokens, columns, 1, pairs != 0, 1, false, early, at<const int32_t>(items), experts, most_items,
                    static_cast<Turns>(turns)},
                   at<CUstream_st>(stream)),
              "many_experts");
      },
      "Rows of x by expert, times the experts' weights in strips; sizes: M, K, N, inputs, outputs; counts: "
      "experts, items; division: tokens and columns of a block, whether two share K, tiles: 0 all, 1 of whole turns, 2 the rest.");
}

}  // namespace qload::cuda
