// Launches: kernels for up to 1, 2, 4, 8 and 16 tokens.
#include "floats.cuh"

namespace qload::cuda {
namespace {

template <int tokens>
cudaError_t launch(const FloatRows& work, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((work.N + kBlockOutputs - 1) / kBlockOutputs);
  few_floats<tokens><<<blocks, kFloatThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

constexpr int64_t kMostTokens = 16, kMostInputs = int64_t{1} << 26;  // limits of int offsets

bool is_whole(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0; }

}  // namespace

cudaError_t multiply_floats(const FloatRows& work, cudaStream_t stream) {
  if (work.M > kMostTokens || work.K > kMostInputs || work.K % kQuad || !is_whole(work.x) || !is_whole(work.w)) return cudaErrorNotSupported;
  if (work.M == 0 || work.N == 0) return cudaSuccess;
  if (work.M == 1) return launch<1>(work, stream);
  if (work.M == 2) return launch<2>(work, stream);
  if (work.M <= 4) return launch<4>(work, stream);
  if (work.M <= 8) return launch<8>(work, stream);
  return launch<16>(work, stream);
}

}  // namespace qload::cuda
