// Inputs as codes, sums of codes as results, and few tokens in float32.
#include <array>
#include <tuple>

#include "../floats/floats.h"
#include "../quantize/quantize.h"
#include "common.h"

namespace qload::cuda {

void add_quantize(py::module_& module) {
  module.def(
      "quantize",
      [](uintptr_t x, int type, const std::array<int64_t, 3>& sizes, const std::tuple<int, int, bool, bool, int>& scheme,
         double most, double bound, const std::array<uintptr_t, 2>& stored, const std::array<int, 2>& becoming,
         const std::tuple<int64_t, bool>& rows, const std::array<uintptr_t, 5>& made, uintptr_t stream) {
        const auto [M, K, pitch] = sizes;
        const auto [finding, size, all, whole, bits] = scheme;
        const auto [written, ones] = rows;
        const cudaError_t error =
            quantize({at<const void>(x), static_cast<Float>(type), M, K, pitch, static_cast<Finding>(finding), size, all,
                      whole, bits, static_cast<float>(most), bound > 0, static_cast<float>(bound),
                      at<const float>(stored[0]), at<const float>(stored[1]), static_cast<Becoming>(becoming[0]),
                      static_cast<Float>(becoming[1]), written, ones, at<void>(made[0]), at<float>(made[1]),
                      at<float>(made[2]), at<float>(made[3]), at<uint32_t>(made[4])},
                     at<CUstream_st>(stream));
        if (error != cudaErrorNotSupported) check(error, "quantize");
        return error == cudaSuccess;
      },
      "Inputs as codes. sizes: M, K, elements from row to row; scheme: finding, inputs of a group, all tokens, whole "
      "numbers, bits; bound: 0 for none; stored: scale, zero point; becoming: what, its type; rows: all that are "
      "written, ones after the last token; made: codes, steps, zeros, powers, scratch. False: sizes do not fit.");
  module.def(
      "scale_sums",
      [](uintptr_t sums, bool whole, const std::array<int64_t, 3>& sizes, const std::tuple<uintptr_t, bool>& row,
         const std::tuple<uintptr_t, bool>& column, const std::tuple<uintptr_t, bool>& zeros,
         const std::tuple<uintptr_t, int>& bias, uintptr_t y, int type, uintptr_t stream) {
        const auto [M, N, pitch] = sizes;
        const cudaError_t error = scale_sums(
            {at<const void>(sums), whole, M, N, at<const float>(std::get<0>(row)), std::get<1>(row),
             at<const float>(std::get<0>(column)), std::get<1>(column), at<const float>(std::get<0>(zeros)),
             std::get<1>(zeros), at<const void>(std::get<0>(bias)), static_cast<Float>(std::get<1>(bias)), at<void>(y),
             static_cast<Float>(type), pitch},
            at<CUstream_st>(stream));
        if (error != cudaErrorNotSupported) check(error, "scale_sums");
        return error == cudaSuccess;
      },
      "Sums of codes as results; sizes: M, N, elements from row to row of y; row, column, zeros: pointer, one each or "
      "one for all; bias: pointer, type. False: sizes do not fit.");
  module.def(
      "multiply_floats",
      [](uintptr_t x, uintptr_t w, uintptr_t bias, uintptr_t y, const std::array<int64_t, 4>& sizes, uintptr_t stream) {
        const auto [M, N, K, pitch] = sizes;
        const cudaError_t error = multiply_floats(
            {at<const float>(x), at<const float>(w), at<const float>(bias), at<float>(y), M, N, K, pitch},
            at<CUstream_st>(stream));
        if (error != cudaErrorNotSupported) check(error, "multiply_floats");
        return error == cudaSuccess;
      },
      "Few tokens times rows of float32; sizes: M, N, K, elements from row to row of y. False: sizes do not fit.");
}

}  // namespace qload::cuda
