// What every instruction set implements, and which of them this machine has.
#pragma once

#include <cstdint>
#include <vector>

#include "../shared/float.h"
#include "codes.h"
#include "plan.h"

namespace qload::cpu {

enum class Isa : int { kScalar, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAvx512Amx };
constexpr const char* kIsaNames[] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx"};
constexpr int kIsas = sizeof kIsaNames / sizeof *kIsaNames;

constexpr int kMostWords = 32;  // of a run

/// Some bits of a run of words: `width` bits from bit `from_bit` of word `from` go to bit `to_bit` of word `to`.
struct Field {
  int from, to, from_bit, to_bit, width;
};

struct Runs {  // words that a list of fields is applied to, lane by lane
  const uint32_t* from;
  uint32_t* to;
  int64_t from_word, to_word;  // between the words of a run
  int64_t from_lane, to_lane;  // between lanes
};

/// What codes of a row mean: (value - zero) * scale * factor in float32, rounded to the dtype of the output.
struct Meaning {
  int bits;           // 2 to 8
  bool high_first;    // 4 bits: whether the first of two codes lies in the high bits
  const float* lookup;     // the value of each code, or null: the code itself
  const float* scale;      // of a row, by group
  const float* zero;       // of a row, by group, or null
  const int32_t* group;    // of each code; null: code / run
  int64_t run;
  const int32_t* place;    // where in the row each value goes; null: where its code is
  bool divide;             // by the scale
  float factor;
  Float out;
};

constexpr int kPanel = 16;  // columns of a panel
constexpr int64_t kColumnsOfLanes = 16;  // a multiple of every instruction set's lanes
constexpr int kBlock = 6;   // tokens whose sums are in registers at once

struct Panels {  // a weight; see product.h
  int bits;
  int64_t rows, run;  // padded: in all, and of a group
  const uint32_t* words;
  const void* scales;
  Float scale_type;
  const uint8_t* zeros;  // or null
  bool narrow;           // codes without their zero points have 5 bits
};

struct Outputs {
  void* y;
  Float type;
  int64_t N;
  const float* bias;  // or null
};

/// Some tokens, in blocks of up to `kBlock`: a block's inputs of row 0, then of row 1, and so on.
struct Tokens {
  const float* x;
  int64_t count, first;  // `first`: the token of `y` that they start with
};

constexpr int kPairs = 4;         // of 8 rows; see pairs.h
constexpr int kPairTokens = 16;  // of a block in pairs

/// How many tokens a block in pairs takes where so many are left; those that are not there have inputs of 0.
constexpr int paired(int64_t left) {
  return left <= 2 ? static_cast<int>(left) : left <= 4 ? 4 : left <= 8 ? 8 : left <= 12 ? 12 : kPairTokens;
}

/// Some tokens as pairs of bfloat16, in blocks of `kPairTokens` and a last one; see pairs.h.
struct PairedTokens {
  const uint32_t* x;
  int parts;
  int64_t count, first;
};

constexpr int kFixedParts = 3, kFixedRows = 8;            // bytes of an input, rows of a word
constexpr int kFixedWords = 2 * kFixedParts;              // of bytes, for these rows

struct FixedGroup {  // see fixed.h
  bool whole;
  float unit;
  int32_t sums[kFixedParts];  // of the bytes
};

struct FixedToken {
  const float* x;
  const FixedGroup* groups;
  const uint32_t* bytes;
};

struct ByteScales {  // see scales.h
  enum Kind { kNone, kExponents, kE4m3 };
  const uint8_t* bytes;
  Kind kind;
  float second;
  bool divided;  // by the second
};

using SpellScales = void (*)(const ByteScales&, int64_t first, int64_t count, float* to);

constexpr int kMostFewRows = 16;   // tokens of rows that become floats in registers, at most
constexpr int kMostOfBlock = 128;  // codes of a row that are read at once

struct RowsOfCodes {
  const Meaning* meaning;  // of each row
  const uint8_t* codes;
  int64_t row_bytes, columns;
  int count;  // up to 16
  const ByteScales* how;         // the scales that are read as they are stored, or null
  const uint8_t* scales[kPanel];  // of each row, where they are
};

/// How few tokens are multiplied with rows; see rows_few.h.
struct FewRows {
  int64_t columns;
  const ByteScales* scales;     // of the rows
  bool stored;                  // whether these are read as they are stored
  int64_t block;                // of codes
  int lanes, inputs;            // words of a register; bfloat16 that an input is, 0: it is a float32
  int most;                     // tokens at once, or up to 4
  uint8_t order[kMostOfBlock];  // which input of a block comes when
  /// `x`: in that order, zeros up to whole blocks, a register of each token after another. `totals`: (tokens, 16).
  void (*dots)(const RowsOfCodes&, const uint32_t* x, int tokens, float* totals);

  int64_t words() const { return (columns + block - 1) / block * (inputs ? block / 2 * inputs : block); }  // of a token
  int64_t together(int64_t left) const { return left >= most ? most : left >= 8 && most > 8 ? 8 : left < 4 ? left : 4; }
};

struct Products {
  /// `count` floats of a type to float32, `step` apart.
  void (*widen)(const void* from, Float type, int64_t count, float* to, int64_t step);
  /// Panels [begin, end), of which up to `together` share what is loaded of x. `few`: tokens up to which codes
  /// become floats in registers. `scratch`: as many floats as `scratch_of` says.
  void (*multiply)(const Panels&, const Tokens&, const Outputs&, int64_t begin, int64_t end, int few, float* scratch);
  /// Floats of scratch for so many tokens.
  int64_t (*scratch_of)(int64_t tokens);
  /// totals (tokens, 16) += x (tokens, columns) times 16 rows of floats; columns a multiple of `kColumnsOfLanes`.
  void (*dots)(const float* tile, int64_t pitch, const float* x, int64_t x_pitch, int64_t tokens, int64_t columns,
               float* totals);
  /// The same of bfloat16, columns a multiple of twice as many. Or null.
  void (*dots_of_halves)(const uint16_t* tile, int64_t pitch, const uint16_t* x, int64_t x_pitch, int64_t tokens,
                         int64_t columns, float* totals);
  /// Totals of 16 outputs, (tokens, 16), from 16 * `panel` on, to those that there are, with the bias.
  void (*finish)(const Outputs&, const Tokens&, int64_t panel, const float* totals);
  /// As `multiply`, for narrow panels of 4 bits, and panels of 8 bits whose groups have whole pairs; `scratch`: 16
  /// floats a token, and of whole blocks. Or null.
  void (*multiply_in_pairs)(const Panels&, const PairedTokens&, const Outputs&, int64_t begin, int64_t end,
                            float* scratch);
  /// As `multiply`, for one token and narrow panels of 4 bits. Or null.
  void (*multiply_fixed)(const Panels&, const FixedToken&, const Outputs&, int64_t begin, int64_t end);
  /// What makes float32 of such scales.
  SpellScales (*scales)(const ByteScales&);
  /// Columns [begin, end) of rows as floats of a type, `pitch` apart, and zeros up to whole 64; `begin` is a multiple of
  /// these. False, and nothing, where it does not spell out what they mean. Or null.
  bool (*spell)(const RowsOfCodes&, int64_t begin, int64_t end, Float type, void* tile, int64_t pitch);
  /// Whether rows that mean this are multiplied with few tokens of a type in registers, and how; `way` says
  /// how many columns there are, and what their scales are.
  /// Or null.
  bool (*few_rows)(const Meaning&, Float type, FewRows& way);
  int64_t most_few;  // tokens, beyond which rows are spelled out
};

struct TileProducts;

struct Kernels {
  int widest;
  /// Tiles of a plan; see network.h.
  void (*run)(const Plan&, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream);
  /// `count` words, shifted right, cut to 2, 4 or 8 bits and packed; returns the bits that any of them had.
  uint32_t (*narrow)(int bits, const int32_t* words, int64_t count, int shift, uint8_t* codes);
  /// The inverse: packed codes, or a stream of any width up to 8, to int32.
  void (*widen)(int bits, const uint8_t* codes, int64_t count, int32_t* words);
  /// Fields of `lanes` runs; returns the bits that any of the words read had.
  uint32_t (*fields)(const Runs&, const Field*, int count, int from_words, int to_words, int64_t lanes);
  /// The values of codes [begin, end) of a row; `codes` and `out` start at `begin`, `row` at the row's 0.
  void (*expand)(const Meaning&, const uint8_t* codes, int64_t begin, int64_t end, void* row, bool stream);
  void (*copy)(const uint8_t* from, uint8_t* to, int64_t bytes, bool stream);
  void (*fence)();  // after streamed stores
  const Products* products;
  CodeDots code_dots;
  const TileProducts* tiles;  // of many tokens, see tiled.h; or null
};

/// `Products::multiply_fixed`, by bytes.
void multiply_fixed_vnni(const Panels&, const FixedToken&, const Outputs&, int64_t begin, int64_t end);

extern const Products kScalarProducts;

extern const Kernels kScalarKernels;
#ifdef QLOAD_X86
extern const Kernels kAvx2Kernels, kAvx512Kernels, kAvx512VnniKernels, kAvx512Bf16Kernels;
extern const Products kAvx2Products, kAvx512Products, kVnniProducts, kBf16Products;
#endif
#ifdef QLOAD_AMX
extern const Kernels kAvx512AmxKernels;
extern const TileProducts kAmxProducts;
#endif

bool has(Isa isa);
std::vector<Isa> best_first();  // that this machine has
const Kernels& kernels(Isa isa);

}  // namespace qload::cpu
