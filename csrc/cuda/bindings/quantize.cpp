// Quantization of inputs, results from sums of codes, and products of few tokens in float32.
#include <array>
#include <tuple>

#include "../floats/floats.h"
#include "../quantize/quantize.h"
#include "common.h"

namespace qload::cuda {

void add_quantize(py::module_& module) {
  module.def(
      "quantizer",
      [](int type, int64_t K, const std::tuple<int, int, bool, bool, int>& scheme, double most, double bound,
         const std::array<int, 2>& becoming, const std::array<int, 2>& stored, bool scale_each, bool ones, bool each) {
        const auto [finding, size, all, whole, bits] = scheme;
        Quantizing work{};
        work.type = static_cast<Float>(type), work.K = K, work.finding = static_cast<Finding>(finding);
        work.size = size, work.all = all, work.whole = whole, work.bits = bits;
        work.most = static_cast<float>(most), work.one_over_most = 1 / work.most;
        work.bounded = bound > 0, work.bound = static_cast<float>(bound);
        work.becoming = static_cast<Becoming>(becoming[0]), work.made = static_cast<Float>(becoming[1]);
        work.scale_type = static_cast<Stored>(stored[0]), work.zero_type = static_cast<Stored>(stored[1]);
        work.scale_each = scale_each, work.ones = ones, work.each = each;
        return py::cpp_function([work](uintptr_t x, int64_t M, int64_t pitch, uintptr_t scale, uintptr_t zero, int64_t rows,
                                       uintptr_t codes, uintptr_t steps, uintptr_t zeros, uintptr_t powers,
                                       uintptr_t scratch, uintptr_t stream) {
          Quantizing own = work;
          own.x = at<const void>(x), own.M = M, own.pitch = pitch, own.rows = rows;
          own.scale = at<const void>(scale), own.zero = at<const void>(zero);
          own.codes = at<void>(codes), own.steps = at<float>(steps), own.zeros = at<float>(zeros);
          own.powers = at<float>(powers), own.largest = at<uint32_t>(scratch);
          const cudaError_t error = quantize(own, at<CUstream_st>(stream));
          if (error != cudaErrorNotSupported) check(error, "quantize");
          return error == cudaSuccess;
        });
      },
      "Launches inputs as codes; scheme: finding, inputs of a group, all tokens, whole numbers, bits; bound: 0 for none; "
      "becoming: what, its type; stored: types of the stored scale and zero point; scale_each: a float32 scale of each "
      "token; ones: a row of ones after the last token; each: a step of each token even if all share one. The launch "
      "takes x, M, elements from row to row, stored scale and zero point, rows that are written, then codes, steps, "
      "zeros, powers, scratch, stream. False: sizes do not fit.");
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
