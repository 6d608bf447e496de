// What a launch decided, kept for the next that is alike: deciding costs the host more than launching.
#pragma once

#include <array>
#include <cstdint>

namespace qload::cuda {

/// Values by a few numbers, of which later ones take the place of earlier ones. For one thread.
template <class Value, int kNumbers, int kPlaces = 512>
class Remembered {
 public:
  using Key = std::array<int, kNumbers>;

  /// Null where the key is not known, or not any more.
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
