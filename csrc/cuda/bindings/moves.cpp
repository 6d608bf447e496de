// Moves of elements from one order to another, and of bytes from the host and from files.
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "../copy/copy.h"
#ifndef _WIN32  // without reads at positions
#include "../copy/file_reader.h"
#endif
#include "../move/move.h"
#include "../move/narrow.h"
#include "common.h"

namespace qload::cuda {

void add_moves(py::module_& module) {
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
          [](FileReader& self, const std::vector<std::tuple<int, int64_t, size_t, uintptr_t, int64_t, int64_t>>& asked,
             uintptr_t home) {
            const py::gil_scoped_release unlocked;
            std::vector<FileRange> ranges;
            for (const auto& [descriptor, offset, bytes, to, runs, distance] : asked) {
              ranges.push_back({descriptor, offset, bytes, at<void>(to), runs, distance});
            }
            uint64_t ticket = 0;
            check(self.begin(ranges, at<CUstream_st>(home), &ticket), "FileReader.begin");
            return ticket;
          },
          "Begin to read (descriptor, offset, bytes, to, runs, distance), after the work of the stream at home; a ticket.")
      .def(
          "wait",
          [](FileReader& self, uint64_t ticket, uintptr_t stream) {
            const auto is_read = [&] {
              const py::gil_scoped_release unlocked;
              return self.is_read(ticket, std::chrono::milliseconds(100));
            };
            while (!is_read()) {  // Ctrl-C ends the wait for files
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
}

}  // namespace qload::cuda
