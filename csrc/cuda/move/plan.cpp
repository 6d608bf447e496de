// Construction of plans: which bits of an element's number are unit, register, thread and block.
#include "plan.h"

#include <algorithm>
#include <limits>

namespace qload::cuda {
namespace {

class Planner {
 public:
  Planner(int bits, const std::vector<Digit>& digits, Plan& plan)
      : bits_(bits), digits_(digits), plan_(plan), taken_(digits.size(), 0) {}

  bool make(int unit, int least_register_bits, int least_thread_bits, Look* look) {
    const int inside = log2_of(unit * 8 / bits_);
    std::vector<Bit> from, to;
    if (!lowest(digits_, &Digit::from, inside, from) || !lowest(digits_, &Digit::to, inside, to)) return false;
    plan_ = Plan{};
    plan_.unit = unit;
    per_unit_ = int64_t{1} << inside;
    std::vector<Bit> apart;  // of registers, in the order of loads
    for (const Bit& bit : to)
      if (!has(from, bit)) apart.push_back(bit);
    for (size_t d = 0; d < digits_.size(); ++d)
      for (const auto* side : {&from, &to})
        for (const Bit& bit : *side)
          if (bit.digit == static_cast<int>(d)) taken_[d] = std::max(taken_[d], bit.level + 1);
    const int more = std::max<int>(0, least_register_bits - static_cast<int>(apart.size()));
    std::vector<Bit> others = choose(kThreadBits + more);
    if (static_cast<int>(others.size()) < least_thread_bits) return false;
    plan_.thread_bits = std::min<int>(kThreadBits, static_cast<int>(others.size()));
    const std::vector<Bit> threads(others.begin(), others.begin() + plan_.thread_bits);
    apart.insert(apart.end(), others.begin() + plan_.thread_bits, others.end());
    plan_.register_bits = static_cast<int>(apart.size());
    if (plan_.register_bits > kMostRegisterBits) return false;
    std::vector<Bit> loaded = apart;
    route(from, to, apart);
    if (look) {
      *look = Look{};
      look->whole = std::all_of(from.begin(), from.end(), [&](const Bit& bit) { return !digits_[bit.digit].row; });
      if (look->whole)
        fill(*look, per_unit_, threads, loaded, {});
      else
        fill(*look, 1, threads, apart, to);
    }
    return place(threads, loaded, apart) && loops(look != nullptr);
  }

 private:
  static bool has(const std::vector<Bit>& bits, const Bit& bit) {
    return std::find(bits.begin(), bits.end(), bit) != bits.end();
  }

  int64_t stride(const Bit& bit, int64_t Digit::*side) const { return digits_[bit.digit].*side << bit.level; }

  // Further bits of the tile: alternately the closest ones in `from` and in `to`; in the order of `from`.
  std::vector<Bit> choose(int count) {
    std::vector<Bit> chosen;
    for (int turn = 0; static_cast<int>(chosen.size()) < count; ++turn) {
      int64_t Digit::*side = turn % 2 ? &Digit::to : &Digit::from;
      int best = -1;
      for (size_t d = 0; d < digits_.size(); ++d) {
        if (twos(digits_[d].size) <= taken_[d]) continue;
        if (best < 0 || digits_[d].*side << taken_[d] < digits_[best].*side << taken_[best]) best = static_cast<int>(d);
      }
      if (best < 0) break;
      chosen.push_back({best, taken_[best]++});
    }
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](const Bit& a, const Bit& b) { return stride(a, &Digit::from) < stride(b, &Digit::from); });
    return chosen;
  }

  // Steps that move each bit of `wanted` to its position. They change `apart`.
  void route(std::vector<Bit> place, const std::vector<Bit>& wanted, std::vector<Bit>& apart) {
    for (size_t p = 0; p < wanted.size(); ++p) {
      if (place[p] == wanted[p]) continue;
      Step& step = plan_.step[plan_.steps++];
      const auto reg = std::find(apart.begin(), apart.end(), wanted[p]);
      if (reg != apart.end()) {  // the upper half of each register pair and the lower half of its partner are exchanged
        step.reg = static_cast<int>(reg - apart.begin());
        step.shift = bits_ << p;
        step.mask = clear_at({static_cast<int>(p)});
        std::swap(*reg, place[p]);
        continue;
      }
      const size_t q = std::find(place.begin(), place.end(), wanted[p]) - place.begin();
      step.reg = -1;
      step.shift = (bits_ << q) - (bits_ << p);
      step.mask = 0;
      for (int e = 0; e < per_unit_; ++e)  // elements whose bit p is set and bit q is not
        if ((e >> p & 1) && !(e >> q & 1)) step.mask |= element(e);
      std::swap(place[p], place[q]);
    }
  }

  uint32_t element(int e) const {
    const uint32_t ones = bits_ == 32 ? ~0u : (1u << bits_) - 1;
    return ones << (e * bits_);
  }

  uint32_t clear_at(const std::vector<int>& positions) const {
    uint32_t mask = 0;
    for (int e = 0; e < per_unit_; ++e) {
      bool clear = true;
      for (const int p : positions) clear &= !(e >> p & 1);
      if (clear) mask |= element(e);
    }
    return mask;
  }

  bool place(const std::vector<Bit>& threads, const std::vector<Bit>& loaded, const std::vector<Bit>& stored) {
    std::vector<Bit> order = threads;
    order.insert(order.end(), stored.begin(), stored.end());
    std::stable_sort(order.begin(), order.end(),
                     [&](const Bit& a, const Bit& b) { return stride(a, &Digit::to) < stride(b, &Digit::to); });
    const auto rank = [&](const Bit& bit) {
      return static_cast<int>(std::find(order.begin(), order.end(), bit) - order.begin());
    };
    int64_t most_from = 0, most_to = 0;
    bool whole = true;
    const auto units = [&](const Bit& bit, int64_t Digit::*side, int64_t& most) {
      const int64_t elements = stride(bit, side);
      whole &= elements % per_unit_ == 0;
      most += elements / per_unit_;
      return elements / per_unit_;
    };
    for (size_t i = 0; i < threads.size(); ++i) {
      plan_.from_thread[i] = static_cast<int32_t>(units(threads[i], &Digit::from, most_from));
      plan_.place_thread[i] = 1 << rank(threads[i]);
    }
    std::vector<int64_t> from(loaded.size());
    for (size_t i = 0; i < loaded.size(); ++i) from[i] = units(loaded[i], &Digit::from, most_from);
    for (size_t i = 0; i < order.size(); ++i)
      plan_.to_bit[i] = static_cast<int32_t>(units(order[i], &Digit::to, most_to));
    for (int reg = 0; reg < 1 << plan_.register_bits; ++reg)
      for (int bit = 0; bit < plan_.register_bits; ++bit) {
        if (!(reg >> bit & 1)) continue;
        plan_.from_register[reg] += static_cast<int32_t>(from[bit]);
        plan_.place_register[reg] |= 1 << rank(stored[bit]);
      }
    plan_.run = plan_.unit;
    for (size_t i = 0; i < order.size() && plan_.run < 16 && plan_.to_bit[i] == 1 << i; ++i) plan_.run *= 2;
    const int64_t per_run = plan_.run / plan_.unit;
    for (size_t i = log2_of(per_run); i < order.size(); ++i)
      if (plan_.to_bit[i] % per_run) plan_.run = plan_.unit;
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    return whole && most_from < limit && most_to < limit;
  }

  void fill(Look& look, int64_t unit, const std::vector<Bit>& threads, const std::vector<Bit>& registers,
            const std::vector<Bit>& inside) const {
    const auto add = [&](const Bit& bit, int64_t& from, int64_t& row) {
      const int64_t rows = stride(bit, &Digit::row);
      row += rows;
      if (!rows) from += stride(bit, &Digit::from) / unit;
    };
    for (size_t i = 0; i < threads.size(); ++i) add(threads[i], look.from_thread[i], look.row_thread[i]);
    for (int reg = 0; reg < 1 << registers.size(); ++reg)
      for (size_t bit = 0; bit < registers.size(); ++bit)
        if (reg >> bit & 1) add(registers[bit], look.from_register[reg], look.row_register[reg]);
    for (int e = 0; e < per_unit_ && !inside.empty(); ++e)
      for (size_t bit = 0; bit < inside.size(); ++bit)
        if (e >> bit & 1) add(inside[bit], look.from_element[e], look.row_element[e]);
  }

  bool loops(bool look) {
    plan_.blocks = 1;
    for (size_t d = 0; d < digits_.size(); ++d) {
      const int64_t size = digits_[d].size >> taken_[d];
      if (size == 1) continue;
      if (size > std::numeric_limits<int32_t>::max()) return false;
      const int64_t from = digits_[d].from << taken_[d], to = digits_[d].to << taken_[d];
      if (from % per_unit_ || to % per_unit_ || plan_.loops == kMostLoops) return false;
      if (to / per_unit_ % (plan_.run / plan_.unit)) plan_.run = plan_.unit;
      const int log = log2_of(size);
      const auto factor = static_cast<uint32_t>(((int64_t{1} << (31 + log)) + size - 1) / size);
      plan_.loop[plan_.loops++] = {static_cast<uint32_t>(size), factor, static_cast<uint32_t>(log - 1),
                                   look && digits_[d].row ? 0 : from / per_unit_, to / per_unit_,
                                   digits_[d].row << taken_[d]};
      plan_.blocks *= size;
    }
    return plan_.blocks <= std::numeric_limits<int32_t>::max();
  }

  const int bits_;
  const std::vector<Digit>& digits_;
  Plan& plan_;
  std::vector<int> taken_;  // number of low bits of each digit in the tile
  int64_t per_unit_ = 1;    // elements
};

}  // namespace

bool make_plan(int bits, const std::vector<Digit>& digits, uintptr_t from, uintptr_t to, int least_register_bits,
               Plan& plan, int least_thread_bits, Look* look) {
  for (const int unit : {4, 2, 1}) {
    if (unit * 8 < bits || from % unit || to % unit || (look && unit < 4)) continue;
    if (!Planner(bits, digits, plan).make(unit, least_register_bits, least_thread_bits, look)) continue;
    if (plan.run < 16 || to % plan.run) plan.run = unit;
    return true;
  }
  return false;
}

}  // namespace qload::cuda
