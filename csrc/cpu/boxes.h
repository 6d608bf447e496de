// Packed words on one side, plain rows on the other: pack, unpack, gather rows, dequantize.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace qload::cpu {

constexpr int64_t kScratch = 1 << 17;  // a thread's stack buffer for packed codes in plain order

struct Place {  // a digit of one axis of a packed tensor
  int64_t size, stride;  // in codes
};

/// The position of the code of each (row, column) of a plain matrix: digits of both axes, innermost first.
struct Packed {
  int bits;
  std::vector<Place> rows, columns;
};

/// Whether boxes of whole granules fit the scratch space; the functions below need it.
bool fits(const Packed& packed);

/// Packs plain int32 codes, row r from `codes + r * pitch`, into words; returns the OR of all codes, after the shift.
/// With `source` and `shift`, row r comes from `codes + source[r]`, shifted right by `shift[r]`.
uint32_t pack(const Kernels&, const Packed&, const int32_t* codes, int64_t pitch, const int64_t* source,
              const int32_t* shift, uint8_t* words, int threads);

/// Unpacks words to rows of int32; the inverse of `pack`.
void unpack(const Kernels&, const Packed&, const uint8_t* words, int32_t* codes, int64_t pitch, int threads);

struct Values {  // the values of codes, see Meaning, with tables of scales and zeros (table rows, groups)
  Meaning meaning;
  int64_t groups;  // of a row
  const int32_t* row_group;  // row of the tables for each row of codes; null: row / row_run
  int64_t row_run;
};

/// The row of the tables for a row of codes.
int64_t table_of(const Values& values, int64_t row);

/// The meaning of the codes of one row.
Meaning of_row(const Values& values, int64_t row);

/// Dequantizes packed words to floats: the first `height` rows, and `width` columns of each.
void dequantize(const Kernels&, const Packed&, const Values&, const uint8_t* words, int64_t height, int64_t width,
                uint8_t* out, int64_t pitch, int threads);

/// Dequantizes rows of plain packed codes, 2 to 8 bits each, `row_bytes` apart, to rows of floats.
void dequantize_rows(const Kernels&, const Values&, const uint8_t* codes, int64_t row_bytes, int64_t rows,
                     int64_t columns, uint8_t* out, int64_t pitch, int threads);

}  // namespace qload::cpu
