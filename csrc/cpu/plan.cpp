// Making plans: which digits make a tile, which steps bring its bits to their places.
#include "plan.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace qload::cpu {
namespace {

constexpr int kWidths[] = {64, 32, 8, 4};
constexpr int kByte = 3;  // position 3 is the lowest that tells bytes apart

int log2_of(int64_t power) {
  int log = 0;
  while ((int64_t{1} << log) < power) ++log;
  return log;
}

int twos(int64_t size) {
  int count = 0;
  while (size % 2 == 0 && count < 30) size /= 2, ++count;
  return count;
}

struct Piece {  // digits, and where the move of them starts, in elements
  std::vector<Digit> digits;
  int64_t from, to;
};

struct Side {
  int64_t Digit::*stride;
  std::vector<int> taken;  // how many low bits of each digit one register holds
  std::vector<std::pair<int, int>> order;  // (digit, bit), lowest address first
};

// The `need` lowest address bits of one side, if the digits that hold them are powers of two; else which
// digit would have to be cut to a multiple of which power (`cut`, `multiple`), or cut -1: none would help.
bool lowest(const std::vector<Digit>& digits, int need, Side& side, int& cut, int64_t& multiple) {
  side.taken.assign(digits.size(), 0);
  side.order.clear();
  int64_t reached = 1;
  cut = -1;
  while (need > 0) {
    int found = -1;
    for (size_t d = 0; d < digits.size(); ++d)
      if (digits[d].*side.stride == reached && side.taken[d] == 0 && digits[d].size > 1) found = static_cast<int>(d);
    if (found < 0) return false;
    const int64_t size = digits[found].size;
    const int have = std::min(twos(size), need);
    if (have < need && (int64_t{1} << have) != size) {
      if (size >= (int64_t{1} << need)) cut = found, multiple = int64_t{1} << need;
      return false;
    }
    for (int bit = 0; bit < have; ++bit) side.order.emplace_back(found, bit);
    side.taken[found] = have;
    reached *= size;
    need -= have;
  }
  return true;
}

// Whether registers of one side start at whole bytes, wherever the digits outside of them stand.
bool at_bytes(const std::vector<Digit>& digits, int bits, const Side& side) {
  for (size_t d = 0; d < digits.size(); ++d)
    if (digits[d].size >> side.taken[d] > 1 && (digits[d].*side.stride << side.taken[d]) * bits % 8) return false;
  return true;
}

Shuffle shuffle_of(const std::vector<int>& place, int width, int low) {
  // place[p - low]: the position whose bit comes to position p.
  Shuffle table{};
  for (int byte = 0; byte < width; ++byte) {
    int source = 0;
    for (size_t i = 0; i < place.size(); ++i) {
      const int position = low + static_cast<int>(i);
      if (position >= kByte && (byte >> (position - kByte) & 1)) source |= 1 << (place[i] - kByte);
    }
    for (int inside = kByte; inside < low; ++inside) source |= byte & 1 << (inside - kByte);
    table.source[byte] = static_cast<uint8_t>(source);
  }
  if (width != 32) return table;
  // Two lanes: bit 4 of a byte's number is the lane. Bring what goes there to bit 3, exchange the two
  // bits (one shuffle of quarters), then settle the rest inside of the lanes.
  int comes[5];
  for (int bit = 0; bit < 5; ++bit) comes[bit] = log2_of(table.source[1 << bit]);
  table.crosses = comes[4] != 4;
  std::array<int, 5> first{0, 1, 2, 3, 4};
  if (table.crosses) std::swap(first[comes[4]], first[3]);  // first[b]: the bit that lies at b afterwards
  std::array<int, 5> now = first;
  if (table.crosses) std::swap(now[3], now[4]);
  for (int byte = 0; byte < 32; ++byte) {
    int one = 0, two = 0;
    for (int bit = 0; bit < 4; ++bit) {
      if (!(byte >> bit & 1)) continue;
      one |= 1 << first[bit];
      for (int at = 0; at < 4; ++at)
        if (now[at] == comes[bit]) two |= 1 << at;
    }
    table.first[byte] = static_cast<uint8_t>(one);
    table.second[byte] = static_cast<uint8_t>(two);
  }
  return table;
}

class Network {
 public:
  Network(Plan& plan, int low, int top, std::vector<int> places, std::vector<int> apart,
          const std::vector<int>& wanted)
      : plan_(plan), low_(low), top_(top), place_(std::move(places)), apart_(std::move(apart)), wanted_(wanted) {}

  /// place_[p - low_] is the bit at position p, apart_[r] the bit that tells registers apart by bit r.
  void route() {
    for (int p = low_; p < kByte; ++p) settle_inside_a_byte(p);
    for (size_t reg = 0; reg < apart_.size(); ++reg) {
      const int home = home_of(apart_[reg]);
      if (home < 0) continue;
      int p = home;
      if (home_of(at(p)) >= 0)
        for (p = kByte < low_ ? low_ : kByte; home_of(at(p)) >= 0;) ++p;
      exchange(static_cast<int>(reg), p);
    }
    std::vector<int> source;
    bool moved = false;
    for (int p = low_; p < top_; ++p) {
      source.push_back(position_of(wanted_[p - low_]));
      moved |= source.back() != p;
    }
    if (moved) permute(source);
  }

  const std::vector<int>& apart() const { return apart_; }

 private:
  int& at(int position) { return place_[position - low_]; }

  int home_of(int bit) const {  // its wanted position, or -1: it tells registers apart
    const auto found = std::find(wanted_.begin(), wanted_.end(), bit);
    return found == wanted_.end() ? -1 : low_ + static_cast<int>(found - wanted_.begin());
  }

  int position_of(int bit) const {
    return low_ + static_cast<int>(std::find(place_.begin(), place_.end(), bit) - place_.begin());
  }

  void settle_inside_a_byte(int p) {
    const int bit = wanted_[p - low_];
    if (at(p) == bit) return;
    const auto reg = std::find(apart_.begin(), apart_.end(), bit);
    if (reg != apart_.end()) return exchange(static_cast<int>(reg - apart_.begin()), p);
    int high = position_of(bit);
    if (high > 5) {  // out of reach of a shift in 64 bits
      std::vector<int> source;
      for (int q = low_; q < top_; ++q) source.push_back(q == kByte ? high : q == high ? kByte : q);
      permute(source);
      high = kByte;
    }
    add({Step::kSwap, 0, static_cast<uint8_t>(p), static_cast<uint8_t>(high), 0});
    std::swap(at(p), at(high));
  }

  void exchange(int reg, int p) {
    add({Step::kExchange, static_cast<uint8_t>(reg), static_cast<uint8_t>(p), 0, 0});
    std::swap(apart_[reg], at(p));
  }

  void permute(const std::vector<int>& source) {
    std::vector<int> next;
    for (const int position : source) next.push_back(at(position));
    place_ = next;
    add({Step::kPermute, 0, 0, 0, plan_.shuffles});
    plan_.shuffle[plan_.shuffles++] = shuffle_of(source, plan_.width, low_);
  }

  void add(Step step) { plan_.step[plan_.steps++] = step; }

  Plan& plan_;
  int low_, top_;
  std::vector<int> place_, apart_, wanted_;
};

// The tile of a move, its steps and the loops around it.
void fill(Plan& plan, const Piece& piece, Side& from, Side& to, Pace pace) {
  const int low = log2_of(plan.bits), top = kByte + log2_of(plan.width);
  std::vector<int> taken(piece.digits.size());
  int bits = 0;
  for (size_t d = 0; d < taken.size(); ++d) bits += taken[d] = std::max(from.taken[d], to.taken[d]);
  const auto registers = [&] { return 1 << (bits - (top - low)); };
  while (registers() * plan.width < kTileBytes && registers() < kMostRegisters) {  // more of the digit that lies closest together
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
  std::vector<std::pair<int, int>> all;
  std::vector<int64_t> from_stride, to_stride;
  for (size_t d = 0; d < taken.size(); ++d)
    for (int bit = 0; bit < taken[d]; ++bit) {
      all.emplace_back(d, bit);
      from_stride.push_back(piece.digits[d].from << bit);
      to_stride.push_back(piece.digits[d].to << bit);
    }
  const auto number = [&](std::pair<int, int> bit) {
    return static_cast<int>(std::find(all.begin(), all.end(), bit) - all.begin());
  };
  std::vector<int> places, wanted, apart;
  for (const auto& bit : from.order) places.push_back(number(bit));
  for (const auto& bit : to.order) wanted.push_back(number(bit));
  for (int bit = 0; bit < bits; ++bit)
    if (std::find(places.begin(), places.end(), bit) == places.end()) apart.push_back(bit);
  std::sort(apart.begin(), apart.end(), [&](int a, int b) { return from_stride[a] < from_stride[b]; });
  Network network(plan, low, top, places, apart, wanted);
  network.route();
  plan.registers = 1 << apart.size();
  std::vector<int64_t> goes(plan.registers);
  for (int reg = 0; reg < plan.registers; ++reg) {
    plan.from[reg] = 0;
    for (size_t bit = 0; bit < apart.size(); ++bit) {
      if (!(reg >> bit & 1)) continue;
      plan.from[reg] += from_stride[apart[bit]] * plan.bits / 8;
      goes[reg] += to_stride[network.apart()[bit]] * plan.bits / 8;
    }
    plan.last[reg] = static_cast<int16_t>(reg);
  }
  std::sort(plan.last, plan.last + plan.registers, [&](int a, int b) { return goes[a] < goes[b]; });
  plan.even = true;
  for (int i = 0; i < plan.registers; ++i) {
    plan.to[i] = goes[plan.last[i]];
    plan.even &= plan.to[i] % plan.width == 0;
  }
  std::vector<Loop> loops;
  for (size_t d = 0; d < taken.size(); ++d) {
    const auto& digit = piece.digits[d];
    if (digit.size >> taken[d] > 1)
      loops.push_back({digit.size >> taken[d], (digit.from << taken[d]) * plan.bits / 8, (digit.to << taken[d]) * plan.bits / 8});
  }
  std::sort(loops.begin(), loops.end(), [&](const Loop& a, const Loop& b) {
    return pace == Pace::kTarget ? a.to > b.to : a.from > b.from;
  });
  for (const auto& loop : loops) {
    plan.loop[plan.loops++] = loop;
    plan.tiles *= loop.size;
    plan.even &= loop.to % plan.width == 0;
  }
}

void plan_piece(int bits, const Piece& piece, int widest, Pace pace, std::vector<Plan>& plans) {
  const int low = log2_of(bits);
  for (const int width : kWidths) {
    if (width > widest) continue;
    const int need = kByte + log2_of(width) - low;
    Side from{&Digit::from, {}, {}}, to{&Digit::to, {}, {}};
    int cut = -1;
    int64_t multiple = 1;
    const bool whole = need > 0 && lowest(piece.digits, need, from, cut, multiple) &&
                       lowest(piece.digits, need, to, cut, multiple);
    if (whole && piece.from * bits % 8 == 0 && piece.to * bits % 8 == 0 && at_bytes(piece.digits, bits, from) &&
        at_bytes(piece.digits, bits, to)) {
      Plan plan;
      plan.width = width;
      plan.bits = bits;
      plan.from_element = piece.from;
      plan.to_element = piece.to;
      fill(plan, piece, from, to, pace);
      plans.push_back(std::move(plan));
      return;
    }
    if (cut < 0) continue;
    Piece main = piece, rest = piece;
    Digit& digit = main.digits[cut];
    const int64_t kept = digit.size / multiple * multiple;
    if (kept == digit.size) continue;
    rest.digits[cut].size = digit.size - kept;
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
  std::sort(plan.digit, plan.digit + plan.digits, [](const Digit& a, const Digit& b) { return a.to > b.to; });
  plan.from_element = piece.from;
  plan.to_element = piece.to;
  plans.push_back(std::move(plan));
}

}  // namespace

std::vector<Plan> make_plans(int bits, const std::vector<Digit>& digits, int widest, Pace pace) {
  Piece piece{{}, 0, 0};
  for (const auto& digit : digits) {
    if (digit.size == 0) return {};
    if (digit.size > 1) piece.digits.push_back(digit);
  }
  auto& all = piece.digits;
  std::sort(all.begin(), all.end(), [](const Digit& a, const Digit& b) { return a.to < b.to; });
  for (size_t d = 0; d + 1 < all.size();) {  // digits that follow each other on both sides are one
    Digit& inner = all[d];
    const Digit& outer = all[d + 1];
    if (outer.from != inner.from * inner.size || outer.to != inner.to * inner.size) {
      ++d;
      continue;
    }
    inner.size *= outer.size;
    all.erase(all.begin() + static_cast<int64_t>(d) + 1);
  }
  std::vector<Plan> plans;
  plan_piece(bits, piece, widest, pace, plans);
  return plans;
}

}  // namespace qload::cpu
