// Operations between the products of a decoder layer.
#include <array>
#include <tuple>

#include "../step/step.h"
#include "common.h"

namespace qload::cuda {

void add_steps(py::module_& module) {
  module.def(
      "add_norm",
      [](uintptr_t x, uintptr_t added, uintptr_t weight, uintptr_t sum, uintptr_t y, const std::array<int, 2>& sizes,
         float eps, bool bfloat16, uintptr_t stream) {
        const auto [rows, size] = sizes;
        check(add_norm({at<const void>(x), at<const void>(added), at<const void>(weight), at<void>(sum), at<void>(y), rows,
                        size, eps, bfloat16},
                       at<CUstream_st>(stream)),
              "add_norm");
      },
      "The sum of two vectors of each token and its norm; sizes: rows, size.");
  module.def(
      "place_heads",
      [](uintptr_t heads, const std::array<uintptr_t, 2>& turns, uintptr_t slots, const std::array<uintptr_t, 2>& norms,
         uintptr_t q, const std::array<uintptr_t, 2>& cache, int64_t places, const std::array<int, 4>& sizes, float eps,
         bool pairs, bool bfloat16, uintptr_t stream) {
        const auto [tokens, queries, kv, size] = sizes;
        check(place_heads({at<const void>(heads), at<const float>(turns[0]), at<const float>(turns[1]),
                           at<const int64_t>(slots), at<const void>(norms[0]), at<const void>(norms[1]), at<void>(q),
                           at<void>(cache[0]), at<void>(cache[1]), places, tokens, queries, kv, size, eps, pairs, bfloat16},
                          at<CUstream_st>(stream)),
              "place_heads");
      },
      "Queries and keys turned, keys and values to a cache. turns: cos, sin; norms: weights of queries and keys; cache: "
      "keys, values; sizes: tokens, heads of queries, of keys, numbers of a head.");
  module.def(
      "gate_pairs",
      [](uintptr_t x, uintptr_t y, const std::array<int, 2>& sizes, const std::tuple<int, float, float>& gate,
         bool bfloat16, uintptr_t stream) {
        const auto [rows, columns] = sizes;
        const auto [kind, alpha, limit] = gate;
        check(gate_pairs({at<const void>(x), at<void>(y), rows, columns, {kind, alpha, limit}, bfloat16},
                         at<CUstream_st>(stream)),
              "gate_pairs");
      },
      "Gate and up of each row become one; sizes: rows, columns of one.");
  module.def(
      "attend_pages",
      [](uintptr_t q, const std::array<uintptr_t, 2>& cache, uintptr_t positions, uintptr_t table, uintptr_t sinks,
         uintptr_t y, const std::array<int64_t, 3>& paging, const std::array<int, 7>& sizes,
         const std::array<int, 2>& limits, float scale, bool bfloat16, uintptr_t stream) {
        const auto [pages, page_size, width] = paging;
        const auto [sequences, heads, kv, k_size, v_size, k_pitch, v_pitch] = sizes;
        const auto [window, chunk] = limits;
        check(attend_pages({at<const void>(q), at<const void>(cache[0]), at<const void>(cache[1]),
                            at<const int64_t>(positions), at<const int64_t>(table), at<const float>(sinks), at<void>(y),
                            pages, static_cast<int>(page_size), static_cast<int>(width), sequences, heads, kv, k_size,
                            v_size, k_pitch, v_pitch, window, chunk, scale, bfloat16},
                           at<CUstream_st>(stream)),
              "attend_pages");
      },
      "Attention of one token of each sequence over pages. paging: pages, tokens of one, pages of a sequence; sizes: "
      "sequences, heads, of keys, numbers of a key and of a value, and their pitches; limits: window, chunk.");
  module.def(
      "route_tokens",
      [](uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t ids, uintptr_t weights, const std::array<int, 4>& sizes,
         const std::array<bool, 3>& choice, bool bfloat16, uintptr_t stream) {
        const auto [tokens, size, experts, top] = sizes;
        const auto [over_chosen, renormalized, rounded] = choice;
        check(route_tokens({at<const void>(x), at<const void>(weight), at<const void>(bias), at<int64_t>(ids),
                            at<float>(weights), tokens, size, experts, top, over_chosen, renormalized, rounded, bfloat16},
                           at<CUstream_st>(stream)),
              "route_tokens");
      },
      "Experts of each token and their weights; sizes: tokens, inputs, experts, experts of a token; choice: whether the "
      "softmax is over the chosen experts, and weights are renormalized and rounded.");
}

}  // namespace qload::cuda
