// Codes to rows of floats.
#include <array>
#include <tuple>

#include "../dequantize/dequantize.h"
#include "../dequantize/streams.h"
#include "common.h"

namespace qload::cuda {

void add_dequantize(py::module_& module) {
  py::class_<Meaning>(module, "Meaning", "What codes mean; see meaning.h.")
      .def(py::init<>())
      .def_readwrite("lookup", &Meaning::lookup)
      .def_readwrite("scales", &Meaning::scales)
      .def_readwrite("scale_type", &Meaning::scale_type)
      .def_readwrite("scale_n", &Meaning::scale_n)
      .def_readwrite("scale_k", &Meaning::scale_k)
      .def_readwrite("offsets", &Meaning::offsets)
      .def_readwrite("offset_places", &Meaning::offset_places)
      .def_readwrite("zeros_kind", &Meaning::zeros_kind)
      .def_readwrite("zero", &Meaning::zero)
      .def_readwrite("zeros", &Meaning::zeros)
      .def_readwrite("zero_n", &Meaning::zero_n)
      .def_readwrite("zero_k", &Meaning::zero_k)
      .def_readwrite("scale_places", &Meaning::scale_places)
      .def_readwrite("zero_places", &Meaning::zero_places)
      .def_readwrite("zero_bits", &Meaning::zero_bits)
      .def_readwrite("zero_word", &Meaning::zero_word)
      .def_readwrite("zero_add", &Meaning::zero_add)
      .def_readwrite("zero_mask", &Meaning::zero_mask)
      .def_readwrite("n_table", &Meaning::n_table)
      .def_readwrite("k_table", &Meaning::k_table)
      .def_readwrite("n_run", &Meaning::n_run)
      .def_readwrite("k_run", &Meaning::k_run)
      .def_readwrite("values", &Meaning::values)
      .def_readwrite("factors", &Meaning::factors)
      .def_readwrite("divide", &Meaning::divide)
      .def_readwrite("factor", &Meaning::factor);
  module.def(
      "dequantize",
      [](int bits, const Strides& digits, int row_bits, const Meaning& meaning, uintptr_t codes, int64_t N, int64_t K,
         int type, uintptr_t out, uintptr_t stream) {
        const Matrix matrix{N, K, at<void>(out), static_cast<Float>(type)};
        const cudaError_t error = dequantize(bits, digits_of(digits), row_bits, meaning, at<const void>(codes), matrix,
                                             at<CUstream_st>(stream));
        if (error != cudaErrorNotSupported) check(error, "dequantize");
        return error == cudaSuccess;
      },
      "Packed codes to rows of floats; digits move them to rows that are 2**row_bits codes apart. False: no plan does.");
  module.def(
      "dequantize_table",
      [](uintptr_t codes, uintptr_t table, uintptr_t scales, int block_bits, int64_t N, int64_t K, int type,
         uintptr_t out, uintptr_t stream) {
        check(dequantize_table(at<const void>(codes), at<const float>(table), at<const float>(scales), block_bits,
                               {N, K, at<void>(out), static_cast<Float>(type)}, at<CUstream_st>(stream)),
              "dequantize_table");
      },
      "Codes of a table of 16, two a byte, the first in the high bits, in flat blocks of 2**block_bits codes.");
  module.def(
      "dequantize_single",
      [](int bytes, int64_t stride_n, int64_t stride_k, const Meaning& meaning, uintptr_t codes, int64_t N,
         int64_t K, int type, uintptr_t out, uintptr_t stream) {
        check(dequantize_single(bytes, stride_n, stride_k, meaning, at<const void>(codes),
                                {N, K, at<void>(out), static_cast<Float>(type)}, at<CUstream_st>(stream)),
              "dequantize_single");
      },
      "Codes that lie one by one to rows of floats; bytes of a code, negative for signed ones.");
  module.def(
      "dequantize_rows",
      [](int source, uintptr_t codes, int64_t pitch, uintptr_t places, int64_t places_pitch, const Meaning& meaning,
         int64_t N, int64_t K, int type, uintptr_t out, uintptr_t stream) {
        const StoredRows stored{at<const void>(codes), pitch, at<const void>(places), places_pitch};
        const cudaError_t error = dequantize_rows(source, stored, meaning, {N, K, at<void>(out), static_cast<Float>(type)},
                                                  at<CUstream_st>(stream));
        if (error != cudaErrorNotSupported) check(error, "dequantize_rows");
        return error == cudaSuccess;
      },
      "Codes in bytes, row by row, to rows of floats; see rows.cuh. False: they lie between two loads.");
  module.def(
      "dequantize_streams",
      [](uintptr_t words, int64_t R, int bits, int run, const std::array<uintptr_t, 3>& tables, uintptr_t order,
         const std::tuple<uintptr_t, int, int64_t, int64_t>& scales, const std::array<uintptr_t, 2>& squares,
         const std::tuple<uintptr_t, int64_t, int, int>& zeros, int64_t N, int64_t K, int type, uintptr_t out,
         uintptr_t stream) {
        const auto [factors, scale_type, scale_n, scale_k] = scales;
        const auto [points, pitch, add, mask] = zeros;
        const cudaError_t error =
            dequantize_streams({at<const void>(words), R, bits, run, tables, order, factors, scale_type, scale_n, scale_k,
                                squares[0], squares[1], points, pitch, add, mask},
                               {N, K, at<void>(out), static_cast<Float>(type)}, at<CUstream_st>(stream));
        if (error != cudaErrorNotSupported) check(error, "dequantize_streams");
        return error == cudaSuccess;
      },
      "Codes down columns of words to rows of floats; see streams.cuh. tables: starts, widths, groups; scales: pointer, "
      "type, strides; squares: EXL2's, and units; zeros: pointer, pitch, add, mask. False: sizes do not fit.");
}

}  // namespace qload::cuda
