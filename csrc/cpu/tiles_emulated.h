// The interface of tiles.h in plain C++, with the order of sums from Intel's documentation of TDPBF16PS. A thread ends
// the process if it uses tiles without a configuration, or configures tiles before their release.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "halves.h"
#include "tiled.h"

namespace qload::cpu {
namespace {

/// Replaces a subnormal number by 0, with its sign.
inline float flushed(float value) {
  const uint32_t bits = bits_of(value);
  return bits & 0x7F800000 ? value : float_of(bits & 0x80000000);
}

struct Tiles {
  static void configure() {
    expect_configured(false);
    configured() = true;
  }
  static void release() {
    expect_configured(true);
    configured() = false;
  }

  template <int Tile>
  static void clear() {
    std::memset(tile(Tile), 0, kTileWords * 4);
  }

  template <int Tile>
  static void load(const void* from, int64_t pitch) {
    for (int64_t row = 0; row < kTileRows; ++row)
      std::memcpy(tile(Tile) + row * kTileRows, static_cast<const uint8_t*>(from) + row * pitch, 64);
  }

  template <int Tile>
  static void store(void* to, int64_t pitch) {
    for (int64_t row = 0; row < kTileRows; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * pitch, tile(Tile) + row * kTileRows, 64);
  }

  template <int Sums, int First, int Second>
  static void multiply() {
    uint32_t *const sums = tile(Sums), *const first = tile(First), *const second = tile(Second);
    for (int64_t i = 0; i < kTileRows; ++i)
      for (int64_t j = 0; j < kTileRows; ++j) {
        float of_low = 0, of_high = 0;
        for (int64_t p = 0; p < kTileRows; ++p) {
          const uint32_t a = first[i * kTileRows + p], b = second[p * kTileRows + j];
          of_low = plus_product(of_low, a << 16, b << 16);
          of_high = plus_product(of_high, a & 0xFFFF0000, b & 0xFFFF0000);
        }
        uint32_t& sum = sums[i * kTileRows + j];
        sum = bits_of(flushed(flushed(float_of(sum)) + flushed(of_low + of_high)));
      }
  }

 private:
  static bool& configured() {
    static thread_local bool is = false;
    return is;
  }

  static void expect_configured(bool is) {
    if (configured() != is) std::abort();
  }

  static uint32_t* tile(int number) {
    static thread_local uint32_t all[8][kTileWords];
    expect_configured(true);
    return all[number];
  }

  static float plus_product(float sum, uint32_t a, uint32_t b) {
    return flushed(__builtin_fmaf(flushed(float_of(a)), flushed(float_of(b)), sum));
  }
};

}  // namespace
}  // namespace qload::cpu
