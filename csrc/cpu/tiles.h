// The eight tiles of AMX; with EMULATED_TILES defined, the same in plain C++, for tests on machines without AMX.
#pragma once

#include <cstdint>

#include "tiled.h"

#ifdef EMULATED_TILES
#include "tiles_emulated.h"
#else

namespace qload::cpu {
namespace {

/// In inline assembly, because the intrinsics of some compilers omit that tiles read memory.
struct Tiles {
  /// Configures all tiles with 16 rows of 64 bytes, until `release`.
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, rest[15] = {};
      uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const shape;
    static_assert(sizeof shape == 64, "as the instruction reads it");
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }

  static void release() { asm volatile("tilerelease" : : : "memory"); }

  template <int Tile>
  static void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
  }

  /// Loads rows `pitch` bytes apart.
  template <int Tile>
  static void load(const void* from, int64_t pitch) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(pitch), "i"(Tile) : "memory");
  }

  template <int Tile>
  static void store(void* to, int64_t pitch) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(pitch), "i"(Tile) : "memory");
  }

  template <int Sums, int First, int Second>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(First), "i"(Second));
  }
};

}  // namespace
}  // namespace qload::cpu

#endif
