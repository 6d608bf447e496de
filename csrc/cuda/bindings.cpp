// The module qload.native._cuda: pointers as integers, sizes, a stream. Who calls has checked them.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../shared/address.h"
#include "copy/copy.h"
#ifndef _WIN32  // which has no reads at positions
#include "copy/file_reader.h"
#endif
#include "decode/decode.h"
#include "dequantize/dequantize.h"
#include "dequantize/streams.h"
#include "experts/experts.h"
#include "exllama/exllama.h"
#include "exllama/rounded.h"
#include "floats/floats.h"
#include "gather/gather.h"
#include "many/many.h"
#include "middle/middle.h"
#include "move/move.h"
#include "move/narrow.h"
#include "quantize/quantize.h"
#include "read/read.h"
#include "step/step.h"
#include "w4a16/w4a16.h"

namespace py = pybind11;
using namespace qload;
using namespace qload::cuda;

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

using Strides = std::vector<std::array<int64_t, 4>>;

std::vector<Digit> digits_of(const Strides& strides) {
  std::vector<Digit> digits;
  for (const auto& [size, from, to, row] : strides) digits.push_back({size, from, to, row});
  return digits;
}

// Where the tensors of a product lie; nullptr for one that there is not.
struct Operands {
  const void *x, *weights, *scales, *zeros;
  const int32_t* g_idx;
  void* parts;
  const void* bias;
  void* y;
};

// A product of which all is said but where its tensors lie, and the stream: what a call says is as little as can be.
template <typename Run>
py::cpp_function launch_of(const char* name, Run run) {
  return py::cpp_function([name, run](uintptr_t x, uintptr_t weights, uintptr_t scales, uintptr_t zeros, uintptr_t g_idx,
                                      uintptr_t parts, uintptr_t bias, uintptr_t y, uintptr_t stream) {
    const Operands given{at<const void>(x),        at<const void>(weights), at<const void>(scales),
                         at<const void>(zeros),    at<const int32_t>(g_idx), at<void>(parts),
                         at<const void>(bias),     at<void>(y)};
    check(run(given, at<CUstream_st>(stream)), name);
  });
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.attr("chips") = QLOAD_CHIPS;  // that there is machine code for, as "80 90a"
  module.attr("later") = static_cast<bool>(QLOAD_LATER);  // whether there is PTX for chips after the last of them
#ifdef QLOAD_HOPPER
  module.attr("hopper") = true;  // whether there is machine code with Hopper's matrix instructions
#else
  module.attr("hopper") = false;
#endif
  module.def(
      "move",
      [](int bits, const Strides& digits, uintptr_t from, uintptr_t rows, uintptr_t to, uintptr_t stream) {
        check(move(bits, digits_of(digits), at<const void>(from), at<const int64_t>(rows), at<void>(to),
                   at<CUstream_st>(stream)),
              "move");
      },
      "to[sum digit * to] = from[sum digit * from], digits as (size, from, to, row); rows: 0, or int64 starts.");

  module.def(
      "copy",
      [](const std::vector<std::array<uintptr_t, 3>>& runs, uintptr_t stream) {
        std::vector<Run> all;
        for (const auto& [to, from, bytes] : runs) all.push_back({at<void>(to), at<const void>(from), bytes});
        cudaError_t error;
        {
          py::gil_scoped_release unlocked;
          error = copy(all, at<CUstream_st>(stream));
        }
        check(error, "copy");
      },
      "Runs of bytes (to, from, bytes) from pinned memory of the host, without the interpreter's lock.");
#ifndef _WIN32
  py::class_<FileReader>(module, "FileReader", "Threads that read files to a device; see file_reader.h.")
      .def(py::init([](uintptr_t memory, size_t buffer_bytes, int threads) {
             return std::make_unique<FileReader>(at<void>(memory), buffer_bytes, threads);
           }),
           "Pinned memory for `buffers` buffers a thread, each of so many bytes; copies go to the current device.")
      .def_property_readonly_static("buffers", [](const py::object&) { return FileReader::BUFFERS; })
      .def(
          "begin",
          [](FileReader& self, const std::vector<std::tuple<int, int64_t, size_t, uintptr_t>>& asked, uintptr_t home) {
            const py::gil_scoped_release unlocked;
            std::vector<FileRange> ranges;
            for (const auto& [descriptor, offset, bytes, to] : asked) {
              ranges.push_back({descriptor, offset, bytes, at<void>(to)});
            }
            uint64_t ticket = 0;
            check(self.begin(ranges, at<CUstream_st>(home), &ticket), "FileReader.begin");
            return ticket;
          },
          "Begin to read (descriptor, offset, bytes, to), after what the stream at home was asked for; a ticket.")
      .def(
          "wait",
          [](FileReader& self, uint64_t ticket, uintptr_t stream) {
            const auto is_read = [&] {
              const py::gil_scoped_release unlocked;
              return self.is_read(ticket, std::chrono::milliseconds(100));
            };
            while (!is_read()) {  // whoever presses Ctrl-C does not wait for the files
              if (PyErr_CheckSignals()) throw py::error_already_set();
            }
            const Failure failure = self.wait(ticket, at<CUstream_st>(stream));
            const char* device = failure.device == cudaSuccess ? "" : cudaGetErrorString(failure.device);
            return std::make_tuple(failure.range, failure.system, std::string(device));
          },
          "The stream waits for a ticket's copies. (-1, 0, \"\"), or which range failed, its errno (0: the file ended), "
          "and what the device said.")
      .def(
          "close",
          [](FileReader& self) {
            cudaError_t error;
            {
              const py::gil_scoped_release unlocked;
              error = self.close();
            }
            check(error, "FileReader.close");
          },
          "Drop what was not begun to read, and wait for all else.");
#endif
  module.def(
      "narrow",
      [](int bits, uintptr_t codes, int64_t count, uintptr_t words, uintptr_t seen, uintptr_t stream) {
        check(narrow(bits, at<const void>(codes), count, at<void>(words), at<uint32_t>(seen), at<CUstream_st>(stream)),
              "narrow");
      },
      "int32 codes to `count` words; `seen` gets all bits that the codes had.");
  module.def(
      "widen",
      [](int bits, uintptr_t words, int64_t count, uintptr_t codes, uintptr_t stream) {
        check(widen(bits, at<const void>(words), count, at<void>(codes), at<CUstream_st>(stream)), "widen");
      },
      "`count` words to int32 codes.");

  py::class_<Meaning>(module, "Meaning", "What codes mean; see meaning.h.")
      .def(py::init<>())
      .def_readwrite("lookup", &Meaning::lookup)
      .def_readwrite("scales", &Meaning::scales)
      .def_readwrite("scale_type", &Meaning::scale_type)
      .def_readwrite("scale_n", &Meaning::scale_n)
      .def_readwrite("scale_k", &Meaning::scale_k)
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
  module.def(
      "decode",
      [](const std::array<int, 5>& sizes, int bits, int group, bool own, bool bfloat16, int columns, int split,
         bool early) {
        return launch_of("decode", [=](const Operands& in, CUstream_st* stream) {
          const auto [M, K, N, inputs, outputs] = sizes;
          return decode({in.x, in.weights, in.scales, in.zeros, in.g_idx, nullptr, in.bias, in.y, M, K, N, inputs, outputs,
                         bits, group, own, bfloat16, columns, split, early},
                        stream);
        });
      },
      "Launches x times a 4-bit or 8-bit weight in Marlin's order or our own; sizes: M, K, N, inputs, outputs.");
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
         const std::array<int, 4>& counts, const std::array<int, 5>& sizes, int bits, int group, bool bfloat16,
         const std::array<int, 3>& division, const std::tuple<int, float, float>& gate, bool known, bool early,
         uintptr_t stream) {
        const auto [pairs, total, experts, most_items] = counts;
        const auto [sharing, pitch, K, N, outputs] = sizes;
        const auto [tokens, columns, row_warps] = division;
        const auto [kind, alpha, limit] = gate;
        check(multiply_experts(
                  {{at<const void>(choice[0]), at<const int32_t>(choice[1]), wide, pairs, total, experts},
                   at<const void>(x), at<const void>(weights), at<const void>(scales), at<const void>(zeros),
                   at<const void>(bias), at<const float>(factors), at<const void>(items), at<void>(y), most_items, sharing, pitch, K, N, outputs, bits, group, tokens, columns, row_warps,
                   bfloat16, kind >= 0, {kind, alpha, limit}, known, early},
                  at<CUstream_st>(stream)),
              "experts");
      },
      "x times the weights of the experts that tokens chose, few tokens each. choice: ids, map; counts: pairs, "
      "all experts, those here, items; sizes: pairs that share a row of x, pitch of y, K, N, outputs; division: tokens of "
      "a turn, tiles of a block, warps that share K; gate: kind, -1 for none, alpha, limit.");
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
      "middle",
      [](const std::array<int, 5>& sizes, int bits, int group, bool bfloat16, int columns, int together, int split,
         bool early) {
        return launch_of("middle", [=](const Operands& in, CUstream_st* stream) {
          const auto [M, K, N, inputs, outputs] = sizes;
          return middle({in.x, in.weights, in.scales, in.zeros, in.bias, in.y, M, K, N, inputs, outputs, bits, group,
                         bfloat16, columns, together, split, early},
                        stream);
        });
      },
      "Launches tokens, best from 17 on, times a weight in Marlin's order; sizes: M, K, N, inputs, outputs.");
  module.def(
      "many",
      [](const std::array<int, 5>& sizes, int bits, int group, bool bfloat16, const std::array<int, 4>& division,
         bool early) {
        return launch_of("many", [=](const Operands& in, CUstream_st* stream) {
          const auto [M, K, N, inputs, outputs] = sizes;
          const auto [tokens, columns, pairs, slices] = division;
          return many({in.x, in.weights, in.scales, in.zeros, in.bias, in.y, in.parts, M, K, N, inputs, outputs, bits, group,
                       bfloat16, tokens, columns, pairs != 0, slices, early, nullptr, 0, 0},
                      stream);
        });
      },
      "Launches tokens, best from 17 on, times a weight in our own order; sizes: M, K, N, inputs, outputs. division: tokens "
      "and columns of a block, whether two share K, slices of K, whose sums `parts` gets in fp32.");
  module.def(
      "many_experts",
      [](uintptr_t x, uintptr_t weights, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t y, uintptr_t items,
         const std::array<int, 5>& sizes, const std::array<int, 2>& counts, int bits, int group, bool bfloat16,
         const std::array<int, 3>& division, bool early, uintptr_t stream) {
        const auto [M, K, N, inputs, outputs] = sizes;
        const auto [experts, most_items] = counts;
        const auto [tokens, columns, pairs] = division;
        check(many({at<const void>(x), at<const void>(weights), at<const void>(scales), at<const void>(zeros),
                    at<const void>(bias), at<void>(y), nullptr, M, K, N, inputs, outputs, bits, group, bfloat16, tokens,
                    columns, pairs != 0, 1, early, at<const int32_t>(items), experts, most_items},
                   at<CUstream_st>(stream)),
              "many_experts");
      },
      "Rows of x by expert, times the experts' weights in our own order; sizes: M, K, N, inputs, outputs; counts: "
      "experts, items; division: tokens and columns of a block, whether two share K.");
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
      "w4a16",
      [](const std::array<int, 5>& sizes, int group, bool bfloat16, int columns, int split, bool early) {
        return launch_of("w4a16", [=](const Operands& in, CUstream_st* stream) {
          const auto [M, K, N, inputs, outputs] = sizes;
          return w4a16({in.x, in.weights, in.scales, in.zeros, nullptr, in.bias, in.y, M, K, N, inputs, outputs, group,
                        bfloat16, columns, split, early},
                       stream);
        });
      },
      "Launches x times a 4-bit weight in Marlin's order; sizes: M, K, N, inputs, outputs.");
  module.def(
      "read",
      [](uintptr_t from, int64_t bytes, uintptr_t sink, uintptr_t stream) {
        check(read(at<const void>(from), bytes, at<uint32_t>(sink), at<CUstream_st>(stream)), "read");
      },
      "Read bytes, a multiple of 16, and nothing else: the floor of a kernel's time.");
}
