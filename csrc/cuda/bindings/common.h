// Common code of the bindings: errors as exceptions, digits, launches with pointers as arguments of each call.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../shared/address.h"
#include "../../shared/digit.h"

namespace qload::cuda {

namespace py = pybind11;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

using Strides = std::vector<std::array<int64_t, 4>>;

inline std::vector<Digit> digits_of(const Strides& strides) {
  std::vector<Digit> digits;
  for (const auto& [size, from, to, row] : strides) digits.push_back({size, from, to, row});
  return digits;
}

// Pointers to the tensors of a product; nullptr for an absent one.
struct Operands {
  const void *x, *weights, *scales, *zeros;
  const int32_t* g_idx;
  void* parts;
  const void* bias;
  const float* token_scales;
  void* y;
};

// A product with all arguments but its tensors and the stream, so that a call passes as little as possible.
template <typename Run>
py::cpp_function launch_of(const char* name, Run run) {
  return py::cpp_function([name, run](uintptr_t x, uintptr_t weights, uintptr_t scales, uintptr_t zeros, uintptr_t g_idx,
                                      uintptr_t parts, uintptr_t bias, uintptr_t token_scales, uintptr_t y,
                                      uintptr_t stream) {
    const Operands given{at<const void>(x),        at<const void>(weights), at<const void>(scales),
                         at<const void>(zeros),    at<const int32_t>(g_idx), at<void>(parts),
                         at<const void>(bias),     at<const float>(token_scales), at<void>(y)};
    check(run(given, at<CUstream_st>(stream)), name);
  });
}

void add_moves(py::module_& module);
void add_dequantize(py::module_& module);
void add_quantize(py::module_& module);
void add_linears(py::module_& module);
void add_experts(py::module_& module);
void add_steps(py::module_& module);
void add_peers(py::module_& module);

}  // namespace qload::cuda
