// Planner of moves: the digits of a tile, and the steps for its bits.
#include "plan.h"

#include <algorithm>

#include "../shared/digits.h"
#include "route.h"

namespace qload::cpu {
namespace {

constexpr int kWidths[] = {64, 32, 8, 4};

struct Piece {  // digits, and the first element of their move on both sides
  std::vector<Digit> digits;
  int64_t from, to;
};

// The contents of one register of a side: its bits, lowest address first, and the number of low bits of each digit.
struct Side {
  std::vector<Bit> order;
  std::vector<int> taken;

  Side(const std::vector<Bit>& bits, size_t digits) : order(bits), taken(digits, 0) {
    for (const Bit& bit : bits) taken[bit.digit] = std::max(taken[bit.digit], bit.level + 1);
  }
};

// Whether registers of one side start at whole bytes for every value of the other digits.
bool at_bytes(const std::vector<Digit>& digits, int bits, int64_t Digit::*stride, const Side& side) {
  for (size_t d = 0; d < digits.size(); ++d)
    if (digits[d].size >> side.taken[d] > 1 && (digits[d].*stride << side.taken[d]) * bits % 8) return false;
  return true;
}

// The number of low bits of each digit in a tile; `bits`: their sum.
std::vector<int> taken_by_tile(const Plan& plan, const Piece& piece, const Side& from, const Side& to, int& bits) {
  std::vector<int> taken(piece.digits.size());
  const int positions = kByte + log2_of(plan.width) - log2_of(plan.bits);
  bits = 0;
  for (size_t d = 0; d < taken.size(); ++d) bits += taken[d] = std::max(from.taken[d], to.taken[d]);
  const auto registers = [&] { return 1 << (bits - positions); };
  while (registers() * plan.width < kTileBytes && registers() < kMostRegisters) {  // adds bits of the closest digit
    int best = -1;
    for (size_t d = 0; d < taken.size(); ++d) {
      const auto& digit = piece.digits[d];
      if (twos(digit.size) <= taken[d]) continue;
      const auto near = [&](int i) { return std::min(piece.digits[i].from, piece.digits[i].to) << taken[i]; };
      if (best < 0 || near(static_cast<int>(d)) < near(best)) best = static_cast<int>(d);
    }
    if (best < 0) break;
    ++taken[best], ++bits;
  }
  return taken;
}

// Fills in the addresses for loads and stores of registers, from the strides of their number's bits, in elements.
void place_registers(Plan& plan, const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
  plan.registers = 1 << from.size();
  std::vector<int64_t> goes(plan.registers);
  for (int reg = 0; reg < plan.registers; ++reg) {
    plan.from[reg] = 0;
    for (size_t bit = 0; bit < from.size(); ++bit) {
      if (!(reg >> bit & 1)) continue;
      plan.from[reg] += from[bit] * plan.bits / 8;
      goes[reg] += to[bit] * plan.bits / 8;
    }
    plan.last[reg] = static_cast<int16_t>(reg);
  }
  std::sort(plan.last, plan.last + plan.registers, [&](int a, int b) { return goes[a] < goes[b]; });
  plan.even = true;
  for (int i = 0; i < plan.registers; ++i) {
    plan.to[i] = goes[plan.last[i]];
    plan.even &= plan.to[i] % plan.width == 0;
  }
}

void add_loops(Plan& plan, const Piece& piece, const std::vector<int>& taken, Pace pace) {
  std::vector<Digit> loops;
  for (size_t d = 0; d < taken.size(); ++d) {
    const Digit& digit = piece.digits[d];
    const auto bytes = [&](int64_t stride) { return (stride << taken[d]) * plan.bits / 8; };
    if (digit.size >> taken[d] > 1) loops.push_back({digit.size >> taken[d], bytes(digit.from), bytes(digit.to)});
  }
  std::sort(loops.begin(), loops.end(), [&](const Digit& a, const Digit& b) {
    return pace == Pace::kTarget ? a.to < b.to : a.from < b.from;
  });
  for (const Digit& loop : loops) {
    plan.loop[plan.loops++] = loop;
    plan.tiles *= loop.size;
    plan.even &= loop.to % plan.width == 0;
  }
}

// Fills in the tile of a move, its steps and the loops around it.
void fill(Plan& plan, const Piece& piece, const Side& from, const Side& to, Pace pace) {
  int bits = 0;
  const std::vector<int> taken = taken_by_tile(plan, piece, from, to, bits);
  std::vector<Bit> all;
  std::vector<int64_t> from_stride, to_stride;
  for (size_t d = 0; d < taken.size(); ++d)
    for (int bit = 0; bit < taken[d]; ++bit) {
      all.push_back({static_cast<int>(d), bit});
      from_stride.push_back(piece.digits[d].from << bit);
      to_stride.push_back(piece.digits[d].to << bit);
    }
  const auto number = [&](const Bit& bit) {
    return static_cast<int>(std::find(all.begin(), all.end(), bit) - all.begin());
  };
  std::vector<int> places, wanted, apart;  // apart: bits of a register's number
  for (const Bit& bit : from.order) places.push_back(number(bit));
  for (const Bit& bit : to.order) wanted.push_back(number(bit));
  for (int bit = 0; bit < bits; ++bit)
    if (std::find(places.begin(), places.end(), bit) == places.end()) apart.push_back(bit);
  std::sort(apart.begin(), apart.end(), [&](int a, int b) { return from_stride[a] < from_stride[b]; });
  const auto strides = [&](const std::vector<int64_t>& of) {
    std::vector<int64_t> some;
    for (const int bit : apart) some.push_back(of[bit]);
    return some;
  };
  const std::vector<int64_t> loaded = strides(from_stride);
  route(plan, places, wanted, apart);
  place_registers(plan, loaded, strides(to_stride));
  add_loops(plan, piece, taken, pace);
}

void plan_piece(int bits, const Piece& piece, int widest, Pace pace, std::vector<Plan>& plans) {
  const int low = log2_of(bits);
  for (const int width : kWidths) {
    if (width > widest) continue;
    const int need = kByte + log2_of(width) - low;
    std::vector<Bit> from_bits, to_bits;
    Cut cut;
    const bool whole = need > 0 && lowest(piece.digits, &Digit::from, need, from_bits, &cut) &&
                       lowest(piece.digits, &Digit::to, need, to_bits, &cut);
    const Side from(from_bits, piece.digits.size()), to(to_bits, piece.digits.size());
    if (whole && piece.from * bits % 8 == 0 && piece.to * bits % 8 == 0 &&
        at_bytes(piece.digits, bits, &Digit::from, from) && at_bytes(piece.digits, bits, &Digit::to, to)) {
      Plan plan;
      plan.width = width;
      plan.bits = bits;
      plan.from_element = piece.from;
      plan.to_element = piece.to;
      fill(plan, piece, from, to, pace);
      plans.push_back(std::move(plan));
      return;
    }
    if (cut.digit < 0) continue;
    Piece main = piece, rest = piece;
    Digit& digit = main.digits[cut.digit];
    const int64_t kept = digit.size / cut.multiple * cut.multiple;
    if (kept == digit.size) continue;
    rest.digits[cut.digit].size = digit.size - kept;
    rest.from += kept * digit.from;
    rest.to += kept * digit.to;
    digit.size = kept;
    plan_piece(bits, main, width, pace, plans);
    plan_piece(bits, rest, width, pace, plans);
    return;
  }
  Plan plan;
  plan.bits = bits;
  for (const auto& digit : piece.digits) plan.digit[plan.digits++] = digit, plan.tiles *= digit.size;
  std::sort(plan.digit, plan.digit + plan.digits, [](const Digit& a, const Digit& b) { return a.to < b.to; });
  plan.from_element = piece.from;
  plan.to_element = piece.to;
  plans.push_back(std::move(plan));
}

}  // namespace

std::vector<Plan> make_plans(int bits, const std::vector<Digit>& digits, int widest, Pace pace) {
  bool empty = false;
  const Piece piece{merged(digits, empty), 0, 0};
  if (empty) return {};
  std::vector<Plan> plans;
  plan_piece(bits, piece, widest, pace, plans);
  return plans;
}

}  // namespace qload::cpu
