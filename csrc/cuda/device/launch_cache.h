// A cache of launch decisions: a decision costs more host time than a launch.
#pragma once

#include <array>
#include <cstdint>

namespace qload::cuda {

/// Values by keys of a few numbers. A later key replaces an earlier one in the same place. Not thread-safe.
template <class Value, int kNumbers, int kPlaces = 512>
class LaunchCache {
 public:
  using Key = std::array<int, kNumbers>;

/// Null if the key is absent or was replaced.
  const Value* find(const Key& key) const {
    const Place& place = places_[place_of(key)];
    return place.taken && place.key == key ? &place.value : nullptr;
  }
  void keep(const Key& key, const Value& value) { places_[place_of(key)] = {key, value, true}; }

 private:
  struct Place {
    Key key;
    Value value;
    bool taken;
  };

  static uint32_t place_of(const Key& key) {
    uint32_t mixed = 2166136261u;
    for (const int number : key) mixed = (mixed ^ static_cast<uint32_t>(number)) * 16777619u;
    return (mixed ^ mixed >> 16) % kPlaces;
  }

  std::array<Place, kPlaces> places_{};
};

}  // namespace qload::cuda
