// The CPU module: pointers as integers, sizes and strides. The caller checks that they fit.
//
//   isas()                                                                      instruction sets, best first
//   is_on_threads_of_torch()                                                    see team.h
//   move(isa, bits, digits, from, to, threads)                                  see plan.h
//   move_from_file(isa, bits, digits, source, to, scratch, piece, threads)      see file_move.h
//   FileMover(isa, scratch, piece, threads)                                     see file_mover.h
//     begin([(bits, digits, source, to)]); wait(ticket); close(); is_here
//   pack(isa, bits, rows, columns, codes, pitch, source, shift, words, threads) see boxes.h
//   unpack(isa, bits, rows, columns, words, codes, pitch, threads)
//   fields(isa, fields, from_words, to_words, from_word, to_word, lanes, from, to, threads)   see streams.h
//   dequantize(isa, bits, rows, columns, values, words, height, width, out, pitch, threads)
//   dequantize_rows(isa, bits, values, codes, row_bytes, rows, columns, out, pitch, threads)
//   multiply(isa, bits, sizes, x, perm, words, scales, zeros, zero, offsets, bias, y, few, threads)   see product.h
//   multiply_rows(isa, bits, row_sizes, x, values, scales, codes, row_bytes, bias, y, threads)
//   multiply_codes(isa, code_sizes, x, codes, row_bytes, sums, threads)                      see codes.h
//
//   digits   [(size, from_stride, to_stride)]     strides in elements
//   source   (descriptor, position, bytes) of an open file
//   rows     [(size, stride)], innermost first    strides in codes; columns alike
//   fields   [(from, to, from_bit, to_bit, width)]
//   lanes    [(size, from, to)], outermost first  strides in words
//   values   (high_first, lookup, scale, zero, groups, group, run, row_group, row_run, place, divide, factor,
//             out_type): see Meaning (kernels.h) and Values (boxes.h); out_type 0 float32, 1 float16, 2 bfloat16
//
//   sizes    (M, K, N, rows, group, run, pitch)
//   row_sizes  (M, K, N, pitch)
//   code_sizes  (M, K, N)
//   scales   (kind, second, divided) of ByteScales (kernels.h); kind 0: those of the values are float32
//   offsets  (address, whether they are subtracted from codes)
//   x        (address, type); scales and y alike: 0 float32, 1 float16, 2 bfloat16
//
// 0 stands for an optional pointer that is absent. Each call releases the interpreter's lock for its whole length.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../shared/address.h"
#include "boxes.h"
#include "codes.h"
#include "file_mover.h"
#include "move.h"
#include "product.h"
#include "streams.h"
#include "team.h"

namespace py = pybind11;

namespace qload::cpu {
namespace {

using Triples = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
using Places = std::vector<std::pair<int64_t, int64_t>>;
using Source = std::tuple<int, int64_t, int64_t>;  // of a file: descriptor, start, bytes
using Typed = std::pair<uintptr_t, int>;  // an address, and the number of a Float
using Fields = std::vector<std::tuple<int, int, int, int, int>>;
using Meant = std::tuple<bool, uintptr_t, uintptr_t, uintptr_t, int64_t, uintptr_t, int64_t, uintptr_t, int64_t,
                         uintptr_t, bool, float, int>;

const Kernels& named(const std::string& isa) {
  for (int each = 0; each < kIsas; ++each)
    if (isa == kIsaNames[each]) return kernels(static_cast<Isa>(each));
  throw std::invalid_argument("no instruction set is called " + isa);
}

std::vector<std::string> isas() {
  std::vector<std::string> found;
  for (const Isa isa : best_first()) found.emplace_back(kIsaNames[static_cast<int>(isa)]);
  return found;
}

void check_bits(int bits, int most) {
  if ((bits != 2 && bits != 4 && bits != 8 && bits != 16 && bits != 32) || bits > most)
    throw std::invalid_argument("elements of " + std::to_string(bits) + " bits are not moved here");
}

Packed packed(int bits, const Places& rows, const Places& columns) {
  check_bits(bits, 8);
  if (rows.empty() || columns.empty() || rows.size() + columns.size() > kMostDigits)
    throw std::invalid_argument("an axis needs a digit, and both together at most 16");
  Packed all{bits, {}, {}};
  for (const auto& [size, stride] : rows) all.rows.push_back({size, stride});
  for (const auto& [size, stride] : columns) all.columns.push_back({size, stride});
  if (!fits(all)) throw std::invalid_argument("the granules of this order do not fit the scratch space");
  return all;
}

Values meant(int bits, const Meant& m) {
  if (bits < 2 || bits > 8) throw std::invalid_argument("codes of " + std::to_string(bits) + " bits are not read here");
  const auto& [high_first, lookup, scale, zero, groups, group, run, row_group, row_run, place, divide, factor, out] = m;
  if (out < 0 || out > 2 || run < 1 || row_run < 1) throw std::invalid_argument("no such dtype, or an empty run");
  const Meaning meaning{bits, high_first, at<const float>(lookup), at<const float>(scale), at<const float>(zero),
                        at<const int32_t>(group), run, at<const int32_t>(place), divide, factor,
                        static_cast<Float>(out)};
  return {meaning, groups, at<const int32_t>(row_group), row_run};
}

std::vector<Digit> digits_of(int bits, const Triples& digits) {
  check_bits(bits, 32);
  if (digits.size() > kMostDigits) throw std::invalid_argument("a move has at most 16 digits");
  std::vector<Digit> all;
  for (const auto& [size, source, target] : digits) all.push_back({size, source, target});
  return all;
}

void move_digits(const std::string& isa, int bits, const Triples& digits, uintptr_t from, uintptr_t to, int threads) {
  move(named(isa), bits, digits_of(bits, digits), at<const uint8_t>(from), at<uint8_t>(to), threads);
}

bool move_digits_from_file(const std::string& isa, int bits, const Triples& digits,
                           const Source& source, uintptr_t to, uintptr_t scratch,
                           int64_t piece, int threads) {
  const auto [descriptor, begin, count] = source;
  return move_from_file(named(isa), bits, digits_of(bits, digits), {descriptor, begin, count}, at<uint8_t>(to),
                        at<uint8_t>(scratch), piece, threads);
}

using HeldMover = std::unique_ptr<FileMover, LeftInCopies>;

HeldMover file_mover(const std::string& isa, uintptr_t scratch, int64_t piece, int threads) {
  return HeldMover(new FileMover(named(isa), at<uint8_t>(scratch), piece, threads));
}

uint64_t begin_moves(FileMover& mover, const std::vector<std::tuple<int, Triples, Source, uintptr_t>>& asked) {
  std::vector<FileMove> moves;
  for (const auto& [bits, digits, source, to] : asked) {
    const auto [descriptor, begin, count] = source;
    moves.push_back({bits, digits_of(bits, digits), {descriptor, begin, count}, at<uint8_t>(to)});
  }
  return mover.begin(moves);
}

std::vector<bool> wait_for_moves(FileMover& mover, uint64_t ticket) {
  const auto is_done = [&] {
    const py::gil_scoped_release unlocked;
    return mover.is_done(ticket, std::chrono::milliseconds(100));
  };
  while (!is_done())  // so that Ctrl-C does not wait for the files
    if (PyErr_CheckSignals()) throw py::error_already_set();
  return mover.wait(ticket);
}

uint32_t pack_rows(const std::string& isa, int bits, const Places& rows, const Places& columns, uintptr_t codes,
                   int64_t pitch, uintptr_t source, uintptr_t shift, uintptr_t words, int threads) {
  return pack(named(isa), packed(bits, rows, columns), at<const int32_t>(codes), pitch, at<const int64_t>(source),
              at<const int32_t>(shift), at<uint8_t>(words), threads);
}

void unpack_rows(const std::string& isa, int bits, const Places& rows, const Places& columns, uintptr_t words,
                 uintptr_t codes, int64_t pitch, int threads) {
  unpack(named(isa), packed(bits, rows, columns), at<const uint8_t>(words), at<int32_t>(codes), pitch, threads);
}

uint32_t fields_of_runs(const std::string& isa, const Fields& list, int from_words, int to_words, int64_t from_word,
                        int64_t to_word, const Triples& axes, uintptr_t from, uintptr_t to, int threads) {
  std::vector<Field> fields;
  for (const auto& [source, target, from_bit, to_bit, width] : list) {
    if (source < 0 || source >= from_words || target < 0 || target >= to_words || width < 1 || from_bit < 0 ||
        to_bit < 0 || from_bit + width > 32 || to_bit + width > 32)
      throw std::invalid_argument("a field lies outside of its words");
    fields.push_back({source, target, from_bit, to_bit, width});
  }
  std::vector<Digit> lanes;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    const auto& [size, source, target] = *axis;
    lanes.push_back({size, source, target});
  }
  return move_fields(named(isa), fields, from_words, to_words, from_word, to_word, lanes, at<const uint32_t>(from),
                     at<uint32_t>(to), threads);
}

void dequantize_words(const std::string& isa, int bits, const Places& rows, const Places& columns, const Meant& values,
                      uintptr_t words, int64_t height, int64_t width, uintptr_t out, int64_t pitch, int threads) {
  dequantize(named(isa), packed(bits, rows, columns), meant(bits, values), at<const uint8_t>(words), height, width,
             at<uint8_t>(out), pitch, threads);
}

void dequantize_plain(const std::string& isa, int bits, const Meant& values, uintptr_t codes, int64_t row_bytes,
                      int64_t rows, int64_t columns, uintptr_t out, int64_t pitch, int threads) {
  dequantize_rows(named(isa), meant(bits, values), at<const uint8_t>(codes), row_bytes, rows, columns,
                  at<uint8_t>(out), pitch, threads);
}

Float float_of_number(int type) {
  if (type < 0 || type > 2) throw std::invalid_argument("no such dtype");
  return static_cast<Float>(type);
}

void multiply_panels(const std::string& isa, int bits, const std::array<int64_t, 7>& sizes, const Typed& x,
                     uintptr_t perm, uintptr_t words, const Typed& scales, uintptr_t zeros, uint32_t zero,
                     const std::pair<uintptr_t, bool>& offsets, uintptr_t bias, const Typed& y, int few, int threads) {
  const auto [M, K, N, rows, group, run, pitch] = sizes;
  if ((bits != 4 && bits != 8) || group < 1 || run < group || run % (32 / bits) || rows % run || zero > 128)
    throw std::invalid_argument("these are no panels");
  const Panels weight{bits, rows, run, at<const uint32_t>(words), at<const void>(scales.first), float_of_number(scales.second),
                      at<const uint8_t>(zeros), zero, at<const void>(offsets.first), offsets.second, false};
  const Inputs inputs{at<const void>(x.first), float_of_number(x.second), M, K, pitch, at<const int32_t>(perm), group};
  multiply(named(isa), weight, inputs, {at<void>(y.first), float_of_number(y.second), N, at<const float>(bias)}, few, threads);
}

void multiply_plain(const std::string& isa, int bits, const std::array<int64_t, 4>& sizes, const Typed& x,
                    const Meant& values, const std::tuple<int, float, bool>& scales, uintptr_t codes, int64_t row_bytes,
                    uintptr_t bias, const Typed& y, int threads) {
  const auto [M, K, N, pitch] = sizes;
  const Inputs inputs{at<const void>(x.first), float_of_number(x.second), M, K, pitch, nullptr, K};
  const Values meaning = meant(bits, values);
  if (meaning.meaning.place || meaning.meaning.out != Float::kFloat32)
    throw std::invalid_argument("rows are multiplied in plain order, in float32");
  const auto [kind, second, divided] = scales;
  if (kind < 0 || kind > ByteScales::kE4m3) throw std::invalid_argument("no such scales");
  const ByteScales bytes{at<const uint8_t>(std::get<2>(values)), static_cast<ByteScales::Kind>(kind), second, divided};
  multiply_rows(named(isa), meaning, bytes, at<const uint8_t>(codes), row_bytes, inputs,
                {at<void>(y.first), float_of_number(y.second), N, at<const float>(bias)}, threads);
}

void multiply_bytes(const std::string& isa, const std::array<int64_t, 3>& sizes, uintptr_t x, uintptr_t codes,
                    int64_t row_bytes, uintptr_t sums, int threads) {
  const auto [M, K, N] = sizes;
  multiply_codes(named(isa), at<const int8_t>(x), M, K, at<const int8_t>(codes), row_bytes, N, at<int32_t>(sums),
                 threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.doc() = "Packed codes on a CPU: moved, packed, unpacked, dequantized, multiplied.";
  m.attr("SCRATCH_BYTES") = kScratch;
  m.def("isas", isas);
  m.def("is_on_threads_of_torch", is_on_threads_of_torch);
  m.def("move", move_digits, Unlocked());
  m.def("move_from_file", move_digits_from_file, Unlocked());
  py::class_<FileMover, HeldMover>(m, "FileMover")
      .def(py::init(&file_mover))
      .def("begin", begin_moves, Unlocked())
      .def("wait", wait_for_moves)
      .def("close", &FileMover::close, Unlocked())
      .def_property_readonly("is_here", &FileMover::is_here);
  m.def("pack", pack_rows, Unlocked());
  m.def("unpack", unpack_rows, Unlocked());
  m.def("fields", fields_of_runs, Unlocked());
  m.def("dequantize", dequantize_words, Unlocked());
  m.def("dequantize_rows", dequantize_plain, Unlocked());
  m.def("multiply", multiply_panels, Unlocked());
  m.def("multiply_rows", multiply_plain, Unlocked());
  m.def("multiply_codes", multiply_bytes, Unlocked());
}

}  // namespace qload::cpu
