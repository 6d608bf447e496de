// Products by tiles, for AMX with bfloat16.
#include "panels_tiles.h"
#include "rows_tiles.h"

namespace qload::cpu {
namespace {

void multiply_panels(const Panels& weight, const PairedTokens& tokens, const Outputs& out, int64_t begin, int64_t end,
                     uint32_t* spelled, float* totals) {
  const bool one = tokens.parts == 1;
  const auto way = weight.bits == 8
                       ? one ? multiply_panels_in_tiles<BytesInPairs, 1> : multiply_panels_in_tiles<BytesInPairs, 2>
                   : one ? multiply_panels_in_tiles<NibblesInPairs, 1>
                         : multiply_panels_in_tiles<NibblesInPairs, 2>;
  way(weight, tokens, out, begin, end, spelled, totals);
}

}  // namespace

extern const TileProducts kAmxProducts;
const TileProducts kAmxProducts{Tiles::configure, Tiles::release, inputs_of_panels,       inputs_of_rows, multiply_panels,
                                has_values,       spell_values,   has_nibbles, spell_nibbles,
                                multiply_rows_in_tiles, turn_squares};

}  // namespace qload::cpu
