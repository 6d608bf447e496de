// The module qload.native._cuda: pointers as integers, sizes, a stream. The caller has checked them.
#include "bindings/common.h"
#include "read/read.h"

using namespace qload;
using namespace qload::cuda;

PYBIND11_MODULE(_cuda, module) {
  module.attr("chips") = QLOAD_CHIPS;  // with machine code, as "80 90a"
  module.attr("ptx") = QLOAD_PTX;      // versions, as "80 90": PTX for these chips and all newer ones
#ifdef QLOAD_HOPPER
  module.attr("hopper") = true;  // whether machine code with Hopper's matrix instructions exists
#else
  module.attr("hopper") = false;
#endif
  add_moves(module);
  add_dequantize(module);
  add_quantize(module);
  add_linears(module);
  add_experts(module);
  add_steps(module);
  add_peers(module);
  module.def(
      "read",
      [](uintptr_t from, int64_t bytes, uintptr_t sink, uintptr_t stream) {
        check(read(at<const void>(from), bytes, at<uint32_t>(sink), at<CUstream_st>(stream)), "read");
      },
      "Read bytes, a multiple of 16, and nothing else: the floor of a kernel's time.");
}
