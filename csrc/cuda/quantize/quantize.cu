// Launches: one kernel for each type of x, and for each type of y and of its sums.
#include "quantize.h"

#include <algorithm>

#include "../device/launch.h"
#include "quantize.cuh"
#include "scaled.cuh"

namespace qload::cuda {
namespace {

constexpr int64_t kMostTokens = 65535;  // along y of the grid

template <class T, int kept>
auto kernel_of(const Quantizing& work) {
  return work.whole       ? quantize_tokens<T, Kind::kWhole, kept>
         : work.bits == 8 ? quantize_tokens<T, Kind::kE4m3, kept>
                          : quantize_tokens<T, Kind::kE2m1, kept>;
}

// For few tokens a thread has eight inputs, since multiprocessors are idle; for many tokens it has sixteen.
template <class T>
cudaError_t launch_tokens(const Quantizing& work, cudaStream_t stream) {
  const Device device = this_device();
  const int64_t warps = std::max(int64_t{1}, (work.K / kEight + 31) / 32);
  const bool few = work.M <= device.multiprocessors, early = device.major >= 9;
  const int64_t most = kMostThreads / 32, half = warps > 2 * most ? most / 2 : (warps + 1) / 2;
  const int64_t warps_of_block = few ? std::min(warps, most) : half;
  const int64_t kept = (warps + warps_of_block - 1) / warps_of_block;
  const int threads = static_cast<int>(32 * warps_of_block);
  if (work.all && work.M > 1) {
    const cudaError_t started =
        launch(largest_of_tokens<T>, dim3(static_cast<unsigned>(work.M)), threads, 0, 1, early, stream, work);
    if (started != cudaSuccess) return started;
  }
  const int64_t rows = work.becoming == Becoming::kCodes ? std::max(work.rows, work.M) : work.M;
  auto* kernel = kept == 1 ? kernel_of<T, 1>(work) : kept == 2 ? kernel_of<T, 2>(work) : kernel_of<T, 0>(work);
  return launch(kernel, dim3(static_cast<unsigned>(rows)), threads, 0, 1, early, stream, work);
}

template <class Y>
cudaError_t launch_sums(const Scaling& work, cudaStream_t stream) {
  constexpr int64_t each = kScaledThreads * kFour;
  const dim3 grid(static_cast<unsigned>((work.N + each - 1) / each),
                  static_cast<unsigned>(std::min(work.M, kMostTokens)));
  auto* kernel = work.whole ? scale_sums_kernel<Y, true> : scale_sums_kernel<Y, false>;
  kernel<<<grid, kScaledThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

bool divides_lanes(int size) { return size >= kEight && size <= 32 * kEight && (size & (size - 1)) == 0; }

bool starts_at(const void* pointer, int64_t pitch, int bytes, int element) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0 && pitch * element % bytes == 0;
}

int bytes_of(Float type) { return type == Float::kFloat32 ? 4 : 2; }

}  // namespace

cudaError_t quantize(const Quantizing& work, cudaStream_t stream) {
  const bool grouped = !work.size || (divides_lanes(work.size) && work.K % work.size == 0);
  if (work.K % kEight || !grouped || !starts_at(work.x, work.pitch, 16, bytes_of(work.type)))
    return cudaErrorNotSupported;
  if (work.M == 0) return cudaSuccess;
  if (work.type == Float::kFloat16) return launch_tokens<__half>(work, stream);
  if (work.type == Float::kBfloat16) return launch_tokens<__nv_bfloat16>(work, stream);
  return launch_tokens<float>(work, stream);
}

cudaError_t scale_sums(const Scaling& work, cudaStream_t stream) {
  const int bytes = bytes_of(work.type);
  if (work.N % kFour || !starts_at(work.y, work.pitch, kFour * bytes, bytes) || !starts_at(work.sums, 0, 16, 4) ||
      (work.column_each && !starts_at(work.column, 0, 16, 4)))
    return cudaErrorNotSupported;
  if (work.M * work.N == 0) return cudaSuccess;
  if (work.type == Float::kFloat16) return launch_sums<__half>(work, stream);
  if (work.type == Float::kBfloat16) return launch_sums<__nv_bfloat16>(work, stream);
  return launch_sums<float>(work, stream);
}

}  // namespace qload::cuda
