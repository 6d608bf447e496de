// x times a weight in panels or rows.
//
//   y[m, n] = sum over k of x[m, k] * (scale[g, n] * (code[k, n] - zero[g, n]) - offset[g, n]), + bias[n]
//
//   in   x      T       (M, K)              rows at any stride
//        perm   int32   (K,)                row i of the weight is input perm[i]; optional, identity without it
//        words  uint32  (N/16, rows*b/32, 16)  one word for each of 16 columns in turn, the first row in the low bits
//        scales S       (N/16, rows/run, 16)
//        zeros  uint8   (N/16, rows/run, 16)   optional: all are `zero` without it
//        offsets  S     (N/16, rows/run, 16)   optional; or subtracted from codes: offset * scale in place of offset
//        bias   fp32    (N,)                optional
//   out  y      T       (M, N)              T, S: fp32, fp16, bf16
//
// A group has `group` inputs and takes `run` rows, a whole number of words; the other rows are padding, and their
// inputs are 0. N is padded to whole panels; padded outputs are not written.
//
// Differences are exact, products and sums are in float32, in one order for each output: groups one after
// another, each sum multiplied by its scale once; then offsets times sums of x by group are subtracted. So y has the
// same bits on any number of threads. The sum of a group overflows float32 if |x| exceeds about 1e34; with a weight
// scaled and rounded first it would not. With offsets an infinite input makes outputs NaN.
//
// Within the bound of qload/kernels/products.py of the same weight, without its rounding to T.
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
  int64_t group;        // inputs with the same scale
};

/// Multiplies tokens with panels. Throws std::invalid_argument if `perm` has an index outside of the inputs.
void multiply(const Kernels& kernels, const Panels& weight, const Inputs& inputs, const Outputs& outputs,
              int few, int threads);

/// Multiplies tokens with rows of packed codes in plain order, `row_bytes` apart. The weight is what
/// `dequantize_rows` (boxes.h) computes from `values` in float32, without a copy in memory. `perm` and `group` are not
/// read. The scales are those of `values`, or else `scales`, of the same number, converted to float32 a row at a time.
void multiply_rows(const Kernels& kernels, const Values& values, const ByteScales& scales, const uint8_t* codes,
                   int64_t row_bytes, const Inputs& inputs, const Outputs& outputs, int threads);

}  // namespace qload::cpu
