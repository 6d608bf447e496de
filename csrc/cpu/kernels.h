// The interface of every instruction set, and the list of those that this machine has.
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

constexpr int kMostWords = 32;  // in a run

/// Some bits of a run of words: `width` bits from bit `from_bit` of word `from` go to bit `to_bit` of word `to`.
struct Field {
  int from, to, from_bit, to_bit, width;
};

struct Runs {  // words for a list of fields, lane by lane
  const uint32_t* from;
  uint32_t* to;
  int64_t from_word, to_word;  // between the words of a run
  int64_t from_lane, to_lane;  // between lanes
};

/// The meaning of a row's codes: (value - zero) * scale * factor in float32, rounded to the dtype of the output.
struct Meaning {
  int bits;           // 2 to 8
  bool high_first;    // 4 bits: whether the high bits of a byte are the first of its two codes
  const float* lookup;     // the value of each code, or null: the code itself
  const float* scale;      // by group of the row
  const float* zero;       // by group of the row, or null
  const int32_t* group;    // of each code; null: code / run
  int64_t run;
  const int32_t* place;    // position in the row of each value; null: the position of its code
  bool divide;             // instead of a product with the scale
  float factor;
  Float out;
};

constexpr int kPanel = 16;  // columns of a panel
constexpr int64_t kColumnsOfLanes = 16;  // a multiple of every instruction set's lanes
constexpr int kBlock = 6;   // tokens with sums in registers at once

struct Panels {  // a weight in panels; see product.h
  int bits;
  int64_t rows, run;  // with padding: in total, and in a group
  const uint32_t* words;
  const void* scales;
  Float scale_type;
  const uint8_t* zeros;  // or null: all are `zero`
  uint32_t zero;
  const void* offsets;   // of the type of the scales; or null
  bool of_codes;         // whether offsets are subtracted from codes, not from their products with scales
  bool narrow;           // codes without their zero points have 5 bits
};

constexpr int kGroupSums = 4;  // sums of a token are padded to a multiple

constexpr int64_t padded_groups(int64_t groups) { return (groups + kGroupSums - 1) / kGroupSums * kGroupSums; }

struct GroupSums {  // inputs of all tokens, summed by group; see offsets.h
  const Panels* weight;
  const float* sums;  // (tokens, pitch), zero-padded
  int64_t pitch;
};

struct Outputs {
  void* y;
  Float type;
  int64_t N;
  const float* bias;  // or null
  const GroupSums* sums = nullptr;  // for a weight with offsets
};

/// Some tokens, in blocks of up to `kBlock`: the inputs of a block for row 0, then for row 1, and so on.
struct Tokens {
  const float* x;
  int64_t count, first;  // `first`: row of `y` of the first token
};

constexpr int kPairs = 4;         // in 8 rows; see pairs.h
constexpr int kPairTokens = 16;  // in a block of pairs

/// Size of the next block in pairs if `left` tokens are left; the inputs of missing tokens are 0.
constexpr int paired(int64_t left) {
  return left <= 2 ? static_cast<int>(left) : left <= 4 ? 4 : left <= 8 ? 8 : left <= 12 ? 12 : kPairTokens;
}

/// Some tokens as pairs of bfloat16, in blocks of `kPairTokens` and one last block; see pairs.h.
struct PairedTokens {
  const uint32_t* x;
  int parts;
  int64_t count, first;
};

constexpr int kFixedParts = 3, kFixedRows = 8;            // bytes of an input, rows of a word
constexpr int kFixedWords = 2 * kFixedParts;              // words of bytes for these rows

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

struct ByteScales {  // scales stored as bytes; see scales.h
  enum Kind { kNone, kExponents, kE4m3 };
  const uint8_t* bytes;
  Kind kind;
  float second;
  bool divided;  // by `second`, instead of a product with it
};

using SpellScales = void (*)(const ByteScales&, int64_t first, int64_t count, float* to);

constexpr int kMostFewRows = 16;   // maximum of tokens for rows decoded in registers
constexpr int kMostOfBlock = 128;  // codes of a row in one block

struct RowsOfCodes {
  const Meaning* meaning;  // of each row
  const uint8_t* codes;
  int64_t row_bytes, columns;
  int count;  // rows, up to 16
  const ByteScales* how;         // the format of scales read as stored, or null
  const uint8_t* scales[kPanel];  // as stored, for each row
};

/// Parameters of the products of few tokens with rows; see rows_few.h.
struct FewRows {
  int64_t columns;
  const ByteScales* scales;     // of the rows
  bool stored;                  // whether the kernel reads them as stored
  int64_t block;                // codes
  int lanes, inputs;            // words of a register; bfloat16 parts of an input, or 0 for a float32
  int most;                     // largest number of tokens at once; the rest go by 8 or up to 4
  uint8_t order[kMostOfBlock];  // the input of a block for each position
  /// `x`: inputs in `order`, zero-padded to whole blocks, one register of each token in turn. `totals`: (tokens, 16).
  void (*dots)(const RowsOfCodes&, const uint32_t* x, int tokens, float* totals);

  int64_t words() const { return (columns + block - 1) / block * (inputs ? block / 2 * inputs : block); }  // of a token
  int64_t together(int64_t left) const { return left >= most ? most : left >= 8 && most > 8 ? 8 : left < 4 ? left : 4; }
};

struct Products {
  /// Converts `count` floats of a type to float32, `step` apart.
  void (*widen)(const void* from, Float type, int64_t count, float* to, int64_t step);
  /// Multiplies panels [begin, end); up to `together` of them share loads of x. `few`: the largest number of tokens for
  /// decoding in registers. `scratch`: `scratch_of(tokens)` floats.
  void (*multiply)(const Panels&, const Tokens&, const Outputs&, int64_t begin, int64_t end, int few, float* scratch);
  /// Floats of scratch for this number of tokens.
  int64_t (*scratch_of)(int64_t tokens);
  /// totals (tokens, 16) += x (tokens, columns) times 16 rows of floats; `columns` is a multiple of `kColumnsOfLanes`.
  void (*dots)(const float* tile, int64_t pitch, const float* x, int64_t x_pitch, int64_t tokens, int64_t columns,
               float* totals);
  /// The same for bfloat16; `columns` is a multiple of 2 * `kColumnsOfLanes`. Or null.
  void (*dots_of_halves)(const uint16_t* tile, int64_t pitch, const uint16_t* x, int64_t x_pitch, int64_t tokens,
                         int64_t columns, float* totals);
  /// Writes totals of 16 outputs, (tokens, 16), less offsets plus the bias to the outputs from 16 * `panel` on; skips
  /// padding.
  void (*finish)(const Outputs&, const Tokens&, int64_t panel, float* totals);
  /// As `multiply`, for narrow panels of 4 bits, and panels of 8 bits with whole pairs in each group; `scratch`: 16
  /// floats for each token of whole blocks. Or null.
  void (*multiply_in_pairs)(const Panels&, const PairedTokens&, const Outputs&, int64_t begin, int64_t end,
                            float* scratch);
  /// As `multiply`, for one token and narrow panels of 4 bits. Or null.
  void (*multiply_fixed)(const Panels&, const FixedToken&, const Outputs&, int64_t begin, int64_t end);
  /// The conversion of such scales to float32.
  SpellScales (*scales)(const ByteScales&);
  /// Decodes columns [begin, end) of rows to floats of a type, `pitch` apart, with zeros up to a multiple of 64; `begin`
  /// is such a multiple. Returns false and writes nothing if it does not support the codes. Or null.
  bool (*spell)(const RowsOfCodes&, int64_t begin, int64_t end, Float type, void* tile, int64_t pitch);
  /// Whether few tokens of a type can be multiplied with rows of this meaning in registers; fills in `way`. The caller
  /// has set its columns and scales. Or null.
  bool (*few_rows)(const Meaning&, Float type, FewRows& way);
  int64_t most_few;  // the most tokens for `few_rows`; with more, rows are decoded to memory
};

struct TileProducts;

struct Kernels {
  int widest;
  /// Runs the tiles [begin, end) of a plan; see network.h.
  void (*run)(const Plan&, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool stream);
  /// Shifts `count` words right, cuts them to 2, 4 or 8 bits and packs them; returns the OR of the shifted words.
  uint32_t (*narrow)(int bits, const int32_t* words, int64_t count, int shift, uint8_t* codes);
  /// The inverse: packed codes, or a bit stream of any width up to 8, to int32.
  void (*widen)(int bits, const uint8_t* codes, int64_t count, int32_t* words);
  /// Moves the fields of `lanes` runs; returns the OR of all words that it read.
  uint32_t (*fields)(const Runs&, const Field*, int count, int from_words, int to_words, int64_t lanes);
  /// Decodes codes [begin, end) of a row; `codes` starts at code `begin`, `row` at the row's output 0.
  void (*expand)(const Meaning&, const uint8_t* codes, int64_t begin, int64_t end, void* row, bool stream);
  void (*copy)(const uint8_t* from, uint8_t* to, int64_t bytes, bool stream);
  void (*fence)();  // after streamed stores
  const Products* products;
  CodeDots code_dots;
  const TileProducts* tiles;  // for many tokens, see tiled.h; or null
};

/// `Products::multiply_fixed` with products of bytes.
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
std::vector<Isa> best_first();  // of this machine
const Kernels& kernels(Isa isa);

}  // namespace qload::cpu
