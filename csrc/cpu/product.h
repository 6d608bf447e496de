// x times a weight whose codes lie in panels: what is multiplied, and who does it.
//
//   y[m, n] = sum over k of x[m, k] * scale[g, n] * (code[k, n] - zero[g, n]), + bias[n]
//
//   in   x      T       (M, K)              rows at any stride
//        perm   int32   (K,)                row i of the weight is input perm[i]; may be absent: in order
//        words  uint32  (N/16, rows*b/32, 16)  of 16 columns after another, the first row in the low bits
//        scales S       (N/16, rows/run, 16)
//        zeros  uint8   (N/16, rows/run, 16)   may be absent: all are 2**(b-1)
//        bias   fp32    (N,)                may be absent
//   out  y      T       (M, N)              T, S: fp32, fp16, bf16
//
// A group has `group` inputs and takes `run` rows, a whole number of words; the rest is padding, which meets
// inputs of 0. N is padded to whole panels, whose last outputs are not written.
//
// Differences are exact, products and sums are in float32, in one order for each output: groups one after
// another, whose sum is multiplied by its scale once. So y has the same bits on any number of threads. A sum
// of a group passes float32 where |x| does beyond 1e34; a weight that was rounded before it would not.
//
// Within the bound of qload/kernels/products.py of the same weight, whose rounding to T is not even made.
#pragma once

#include <cstdint>

#include "../shared/float.h"
#include "boxes.h"
#include "kernels.h"

namespace qload::cpu {

struct Inputs {
  const void* x;
  Float type;
  int64_t M, K;
  int64_t pitch;        // between rows, in elements
  const int32_t* perm;  // or null
  int64_t group;        // inputs that share a scale
};

/// Throws std::invalid_argument where `perm` leaves the inputs.
void multiply(const Kernels& kernels, const Panels& weight, const Inputs& inputs, const Outputs& outputs,
              int few, int threads);

/// The same with rows of packed codes in plain order, `row_bytes` apart, whose floats are what `values` says: what
/// `dequantize_rows` (boxes.h) makes of them in float32, and never writes to memory. `perm` and `group` are not read.
/// Scales are those of `values`, or `scales`, as many, which become float32 a row at a time.
void multiply_rows(const Kernels& kernels, const Values& values, const ByteScales& scales, const uint8_t* codes,
                   int64_t row_bytes, const Inputs& inputs, const Outputs& outputs, int threads);

}  // namespace qload::cpu
