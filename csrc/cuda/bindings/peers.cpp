// Sums over ranks by the memory of other devices.
#include "../peers/sum.h"

#include <array>
#include <memory>
#include <string>

#include "common.h"

namespace qload::cuda {

void add_peers(py::module_& module) {
  py::class_<PeerMemory>(module, "PeerMemory", "Memory that the other processes of a machine write to; see memory.h.")
      .def(py::init<int, int>(), "A rank and a world, on the current device.")
      .def_property_readonly_static("most_ranks", [](const py::object&) { return kMostRanks; })
      .def_property_readonly_static("most_rows", [](const py::object&) { return kMostBlocks; })
      .def_property_readonly("message_bytes", [](const PeerMemory& self) { return self.view().message_bytes(); })
      .def("handle", [](const PeerMemory& self) { return py::bytes(self.handle()); }, "64 bytes for the other processes.")
      .def("connect", &PeerMemory::connect, py::call_guard<py::gil_scoped_release>(), "Open the handles of all ranks.")
      .def(
          "sum",
          [](const PeerMemory& self, uintptr_t values, uintptr_t x, uintptr_t weight, uintptr_t total, uintptr_t y,
             const std::array<int64_t, 2>& sizes, float eps, bool bfloat16, uintptr_t stream) {
            check(sum_ranks({self.view(), at<const void>(values), at<const void>(x), at<const void>(weight),
                             at<void>(total), at<void>(y), sizes[0], sizes[1], eps, bfloat16},
                            at<CUstream_st>(stream)),
                  "PeerMemory.sum");
          },
          "The sum of all ranks; with x and a weight, x plus the sum, and its norm. sizes: rows, size.")
      .def("stop", &PeerMemory::stop, "Let kernels that wait for other ranks end.")
      .def("close", &PeerMemory::close, py::call_guard<py::gil_scoped_release>(), "Free the memory.");
}

}  // namespace qload::cuda
