// Detection of the instruction sets of this machine, once.
#include "kernels.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "amx.h"

namespace qload::cpu {

bool has(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return true;
#ifdef QLOAD_X86
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vbmi");
    case Isa::kAvx512Vnni:
      return has(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni");
    case Isa::kAvx512Bf16:
      return has(Isa::kAvx512Vnni) && __builtin_cpu_supports("avx512bf16");
#endif
#ifdef QLOAD_AMX
    case Isa::kAvx512Amx:
      return has(Isa::kAvx512Bf16) && has_tiles();
#endif
    default:
      return false;
  }
}

namespace {

/// Whether products of pairs of bfloat16 are faster than products of floats. On Intel's chips, which have matrix
/// instructions for bfloat16, one takes four times as long as a product of floats (docs/lab/cpu.md).
bool has_fast_pairs() {
#ifdef QLOAD_X86
  return !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace

std::vector<Isa> best_first() {
  std::vector<Isa> found;
  for (const Isa isa : {Isa::kAvx512Amx, Isa::kAvx512Bf16, Isa::kAvx512Vnni, Isa::kAvx512, Isa::kAvx2, Isa::kScalar})
    if (has(isa)) found.push_back(isa);
  const auto pairs = std::find(found.begin(), found.end(), Isa::kAvx512Bf16);
  if (pairs != found.end() && !has_fast_pairs()) std::swap(pairs[0], pairs[1]);
  return found;
}

const Kernels& kernels(Isa isa) {
  if (!has(isa)) throw std::invalid_argument("this CPU does not have the instructions asked for");
#ifdef QLOAD_AMX
  if (isa == Isa::kAvx512Amx) return kAvx512AmxKernels;
#endif
#ifdef QLOAD_X86
  if (isa == Isa::kAvx512Bf16) return kAvx512Bf16Kernels;
  if (isa == Isa::kAvx512Vnni) return kAvx512VnniKernels;
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  return kScalarKernels;
}

}  // namespace qload::cpu
