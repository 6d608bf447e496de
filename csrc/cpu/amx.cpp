// Linux gives the 8 KB of tile state only to processes with a permission, and kills a thread that uses tiles without it.
#include "amx.h"

#ifdef EMULATED_TILES

namespace qload::cpu {

bool has_tiles() { return true; }

}  // namespace qload::cpu

#else

#include <cpuid.h>

#include <cstdint>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qload::cpu {
namespace {

constexpr uint32_t kKeepsStates = 1u << 27;                        // OSXSAVE, of leaf 1
constexpr uint32_t kTilesOfBfloat16 = 1u << 22 | 1u << 24;         // AMX-BF16 and AMX-TILE, of leaf 7
constexpr uint32_t kShapesAndTiles = 1u << 17 | 1u << 18;          // state components saved by the system
[[maybe_unused]] constexpr long kAskForState = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

bool cpu_has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kKeepsStates)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTilesOfBfloat16) != kTilesOfBfloat16) return false;
  uint32_t low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kShapesAndTiles) == kShapesAndTiles;
}

bool may_use_tiles() {
#ifdef __linux__
  return syscall(SYS_arch_prctl, kAskForState, kTiles) == 0;
#else
  return false;
#endif
}

}  // namespace

bool has_tiles() {
  static const bool found = cpu_has_tiles() && may_use_tiles();
  return found;
}

}  // namespace qload::cpu

#endif
