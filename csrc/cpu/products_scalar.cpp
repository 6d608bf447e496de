// Products for any machine, in loops for a compiler to vectorize.
#include "halves.h"
#include "panels.h"
#include "rows.h"
#include "scales.h"
#include "widen.h"

namespace qload::cpu {
namespace {

struct LanesScalar {
  static constexpr int kLanes = 4;
  struct Words {
    uint32_t lane[kLanes];
  };
  struct Floats {
    float lane[kLanes];
  };

  template <class To, class Made>
  static To each(const Made& made) {
    To all;
    for (int i = 0; i < kLanes; ++i) all.lane[i] = made(i);
    return all;
  }

  static Words load(const uint32_t* from) {
    return each<Words>([&](int i) { return from[i]; });
  }
  static Words words(uint32_t word) {
    return each<Words>([&](int) { return word; });
  }
  static Words right(Words words, int bits) {
    return each<Words>([&](int i) { return words.lane[i] >> bits; });
  }
  static Words both(Words a, Words b) {
    return each<Words>([&](int i) { return a.lane[i] & b.lane[i]; });
  }
  static Words either(Words a, Words b) {
    return each<Words>([&](int i) { return a.lane[i] | b.lane[i]; });
  }
  static Words minus_bytes(Words a, Words b) {
    return each<Words>([&](int i) {
      uint32_t made = 0;
      for (int bit = 0; bit < 32; bit += 8) made |= (((a.lane[i] >> bit) - (b.lane[i] >> bit)) & 255) << bit;
      return made;
    });
  }
  static Words four_times(Words bytes) {
    return each<Words>([&](int i) { return bytes.lane[i] * 0x01010101u; });
  }
  static Words raised(Words words, int byte) {
    return each<Words>([&](int i) { return words.lane[i] >> (8 * byte) << 24; });
  }
  static Floats counted(Words words) {
    return each<Floats>([&](int i) { return static_cast<float>(static_cast<int32_t>(words.lane[i])); });
  }
  static Floats as_floats(Words words) {
    return each<Floats>([&](int i) { return float_of(words.lane[i]); });
  }

  static Floats load(const float* from) {
    return each<Floats>([&](int i) { return from[i]; });
  }
  static void store(float* to, Floats values) {
    for (int i = 0; i < kLanes; ++i) to[i] = values.lane[i];
  }
  static Floats all(float value) {
    return each<Floats>([&](int) { return value; });
  }
  static Floats plus(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Floats times(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Floats minus(Floats a, Floats b) {
    return each<Floats>([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Floats plus_product(Floats sum, Floats a, Floats b) {
    return each<Floats>([&](int i) { return sum.lane[i] + a.lane[i] * b.lane[i]; });
  }

  static float across(Floats sums) {
    return (sums.lane[0] + sums.lane[2]) + (sums.lane[1] + sums.lane[3]);
  }

  static Words bytes(const uint8_t* from) {
    return each<Words>([&](int i) { return from[i]; });
  }

  static Floats read(const void* from, Float type, int64_t at) {
    return each<Floats>([&](int i) { return read_one(from, type, at + i); });
  }

  static void write(Floats values, void* to, Float type, int64_t at) {
    if (type == Float::kFloat32) return store(static_cast<float*>(to) + at, values);
    auto* const halves = static_cast<uint16_t*>(to) + at;
    for (int i = 0; i < kLanes; ++i)
      halves[i] = type == Float::kFloat16 ? float16_of(values.lane[i]) : bfloat16_of(values.lane[i]);
  }
};

}  // namespace

extern const Products kScalarProducts;
const Products kScalarProducts{widen<LanesScalar>, multiply<LanesScalar>, scratch_of, dots<LanesScalar>,
                               nullptr, finish<LanesScalar>, nullptr, nullptr, plain_scales, nullptr, nullptr, 0};

}  // namespace qload::cpu
