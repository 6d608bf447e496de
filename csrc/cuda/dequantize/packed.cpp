// Arguments of tiles.cuh from a plan.
#include "packed.h"

#include <algorithm>

namespace qload::cuda {
namespace {

constexpr int kCodes = 8;  // in a word of 4-bit codes
constexpr int kRegisterBits = 3;  // a thread has eight loads in flight
constexpr int kManyExchanges = 3;  // that many exchanges take all these registers; a tile would have short rows

bool planned(int bits, const std::vector<Digit>& digits, uintptr_t codes, Plan& plan) {
  for (const int registers : {kRegisterBits, kRegisterBits + 1}) {
    if (!make_plan(bits, digits, codes, 0, registers, plan, 0)) return false;
    const int exchanges = static_cast<int>(
        std::count_if(plan.step, plan.step + plan.steps, [](const Step& step) { return step.reg >= 0; }));
    if (exchanges < kManyExchanges) break;
  }
  return plan.unit == 4 && plan.register_bits <= kMostTileRegisterBits;
}

/// Digits with the codes of a pair four positions apart: the bits of a code's position in a word, reversed.
std::vector<Digit> paired(const std::vector<Digit>& digits) {
  std::vector<Digit> apart;
  for (Digit digit : digits) {
    while (digit.to < kCodes && digit.size % 2 == 0) {
      apart.push_back({2, digit.from, kCodes / 2 / digit.to, digit.row});
      digit = {digit.size / 2, 2 * digit.from, 2 * digit.to, 2 * digit.row};
    }
    if (digit.size > 1) apart.push_back(digit);
  }
  return apart;
}

}  // namespace

bool make_packed(int bits, const std::vector<Digit>& digits, uintptr_t codes, bool pairs, Plan& plan,
                 bool& is_paired) {
  is_paired = false;
  if (!planned(bits, digits, codes, plan)) return false;
  Plan other;
  if (pairs && bits == 4 && planned(bits, paired(digits), codes, other) && other.steps <= plan.steps) {
    plan = other;
    is_paired = true;
  }
  return true;
}

bool fill_tiles(const Plan& plan, const Meaning& meaning, const Matrix& matrix, int bits, Tiles& tiles) {
  const int size = matrix.type == Float::kFloat32 ? 4 : 2, per_word = 32 / bits;
  const int parts = std::max(1, per_word * size / 16), own_bits = kThreadBits - (parts == 4 ? 2 : parts - 1);
  tiles.same = 0;
  while (!meaning.k_table && tiles.same < own_bits && plan.to_bit[tiles.same] == 1 << tiles.same &&
         meaning.k_run % (2 * int64_t{per_word} << tiles.same) == 0)
    ++tiles.same;
  tiles.whole = reinterpret_cast<uintptr_t>(matrix.out) % 16 == 0 && matrix.K * size % 16 == 0;
  int found = 0;
  for (const bool rows : {true, false})
    for (int bit = 0; bit < plan.thread_bits + plan.register_bits; ++bit)
      if ((plan.to_bit[bit] >> tiles.row_words_bits != 0) == rows) tiles.bit[found++] = static_cast<int8_t>(bit);
  if (!tiles.whole || plan.thread_bits != kThreadBits || plan.register_bits < kRegisterBits ||
      (bits == 8 && plan.register_bits > kRegisterBits) || tiles.same < kLeastSame)
    return false;
  const int tile_bits = kThreadBits + plan.register_bits;
  int64_t bit_to[kMostTileBits], most = 0;
  for (int bit = 0; bit < tile_bits; ++bit) {
    const int64_t words = plan.to_bit[bit], row = words >> tiles.row_words_bits;
    bit_to[bit] = row * tiles.pitch + (words - (row << tiles.row_words_bits)) * per_word;
    most += bit_to[bit];
  }
  const auto along = [&](int place) {
    int64_t sum = 0;
    for (int bit = 0; bit < tile_bits; ++bit) sum += place >> bit & 1 ? bit_to[bit] : 0;
    return static_cast<uint32_t>(sum * size);
  };
  for (int bit = 0; bit < own_bits; ++bit) tiles.to_thread[bit] = along(1 << bit);
  for (int i = 0; i < 1 << plan.register_bits; ++i) {
    tiles.put[i] = 4 * bank<0>(plan.place_register[i]);
    tiles.take[i] = 4 * bank<0>(i << own_bits);
    tiles.to[i] = along(i << own_bits);
  }
  for (int turn = 0; turn < parts; ++turn) {
    const int place = turn << (own_bits + plan.register_bits);
    tiles.take_part[turn] = 4 * bank<0>(place);
    tiles.to_part[turn] = along(place);
  }
  return most * size < int64_t{1} << 32;
}

}  // namespace qload::cuda
