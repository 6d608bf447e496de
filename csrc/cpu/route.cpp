#include "route.h"

#include <algorithm>
#include <array>
#include <utility>

#include "../shared/digits.h"

namespace qload::cpu {
namespace {

Shuffle shuffle_of(const std::vector<int>& place, int width, int low) {
  // place[p - low]: the source position of the bit at position p.
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
  // Two lanes: bit 4 of a byte's number is the lane. The shuffles move its source to bit 3, exchange the two
  // bits (one shuffle of quarters), then put the rest into order inside of the lanes.
  int comes[5];
  for (int bit = 0; bit < 5; ++bit) comes[bit] = log2_of(table.source[1 << bit]);
  table.crosses = comes[4] != 4;
  std::array<int, 5> first{0, 1, 2, 3, 4};
  if (table.crosses) std::swap(first[comes[4]], first[3]);  // first[b]: the bit at b after the first shuffle
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
  Network(Plan& plan, const std::vector<int>& places, const std::vector<int>& wanted, std::vector<int>& apart)
      : plan_(plan), low_(log2_of(plan.bits)), top_(kByte + log2_of(plan.width)), place_(places), wanted_(wanted),
        apart_(apart) {}

  /// place_[p - low_] is the bit at position p, apart_[r] the bit at bit r of a register's number.
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

 private:
  int& at(int position) { return place_[position - low_]; }

  int home_of(int bit) const {  // its wanted position, or -1 for a bit of the register's number
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
    if (high > 5) {  // too far for a shift in 64 bits
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
  std::vector<int> place_;
  const std::vector<int>& wanted_;
  std::vector<int>& apart_;
};

}  // namespace

void route(Plan& plan, const std::vector<int>& places, const std::vector<int>& wanted, std::vector<int>& apart) {
  Network(plan, places, wanted, apart).route();
}

}  // namespace qload::cpu
