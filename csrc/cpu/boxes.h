// Packed words on one side, plain rows on the other: pack, unpack, gather rows, dequantize.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace qload::cpu {

constexpr int64_t kScratch = 1 << 17;  // bytes of packed codes in plain order that a thread keeps on its stack

struct Place {  // a digit of one axis of a packed tensor
  int64_t size, stride;  // in codes
};

/// Where the code of each (row, column) of a plain matrix lies: digits of both axes, innermost first.
struct Packed {
  int bits;
  std::vector<Place> rows, columns;
};

/// Whether boxes of whole granules fit the scratch space; what does not is not done here.
bool fits(const Packed& packed);

/// Plain int32 codes, row r from `codes + r * pitch`, to packed words; returns all bits that were seen.
/// With `source` and `shift`, row r comes from `codes + source[r]`, shifted right by `shift[r]`.
uint32_t pack(const Kernels&, const Packed&, const int32_t* codes, int64_t pitch, const int64_t* source,
              const int32_t* shift, uint8_t* words, int threads);

/// The inverse, to rows of int32.
void unpack(const Kernels&, const Packed&, const uint8_t* words, int32_t* codes, int64_t pitch, int threads);

struct Values {  // what codes mean, see Meaning; tables of scales and zeros have a row each
  Meaning meaning;
  int64_t groups;  // of a row
  const int32_t* row_group;  // which row of the tables each row takes; null: row / row_run
  int64_t row_run;
};

/// Which row of the tables a row takes.
int64_t table_of(const Values& values, int64_t row);

/// What codes of one row mean.
Meaning of_row(const Values& values, int64_t row);

/// Packed words to floats: the first `height` rows, and `width` columns of each.
void dequantize(const Kernels&, const Packed&, const Values&, const uint8_t* words, int64_t height, int64_t width,
                uint8_t* out, int64_t pitch, int threads);

/// Rows of plain packed codes, 2 to 8 bits each, `row_bytes` apart, to rows of floats.
void dequantize_rows(const Kernels&, const Values&, const uint8_t* codes, int64_t row_bytes, int64_t rows,
                     int64_t columns, uint8_t* out, int64_t pitch, int threads);

}  // namespace qload::cpu
