// Launches of streams.cuh: a block has as many outputs as its shared memory holds with all their inputs.
#include "streams.h"

#include <algorithm>

#include "../../shared/address.h"
#include "../device/launch.h"
#include "streams.cuh"

namespace qload::cuda {
namespace {

constexpr int kMostColumns = 32, kLeastColumns = 4, kFewRows = 512;

template <class Out>
cudaError_t launch_streams(Streams streams, Out* out, cudaStream_t stream) {
  streams.rows = static_cast<int>(streams.order ? streams.K : std::min<int64_t>(streams.K, kFewRows));
  const auto bytes = [&](int columns) { return columns * (int64_t{streams.rows} + kTogether) * int64_t{sizeof(Out)}; };
  streams.columns = kMostColumns;
  while (streams.columns >= kLeastColumns && bytes(streams.columns) > this_device().shared) streams.columns /= 2;
  if (streams.columns < kLeastColumns) return cudaErrorNotSupported;
  const int shared = static_cast<int>(bytes(streams.columns));
  auto* kernel = dequantize_streams<Out>;
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((streams.N + streams.columns - 1) / streams.columns),
                  static_cast<unsigned>((streams.K + streams.rows - 1) / streams.rows));
  kernel<<<grid, kStreamThreads, shared, stream>>>(streams, out);
  return cudaGetLastError();
}

}  // namespace

cudaError_t dequantize_streams(const StreamsCall& call, const Matrix& matrix, cudaStream_t stream) {
  if (matrix.N * matrix.K == 0) return cudaSuccess;
  if (matrix.K % kTogether || reinterpret_cast<uintptr_t>(matrix.out) % 16 || call.order % 16 ||
      matrix.K >= int64_t{1} << 20 || call.R >= int64_t{1} << 26 || call.run < 1 || matrix.N >= int64_t{1} << 31)
    return cudaErrorNotSupported;
  const Streams streams{static_cast<const uint32_t*>(call.words),
                        call.R,
                        matrix.N,
                        matrix.K,
                        call.bits,
                        at<const int32_t>(call.tables[0]),
                        at<const int32_t>(call.tables[1]),
                        at<const int32_t>(call.tables[2]),
                        call.run,
                        at<const int32_t>(call.order),
                        call.scales,
                        call.scale_type,
                        call.scale_n,
                        call.scale_k,
                        at<const uint32_t>(call.squares),
                        at<const __half>(call.units),
                        at<const uint32_t>(call.zeros),
                        call.zeros_pitch,
                        call.add,
                        call.mask,
                        0,
                        0};
  if (matrix.type == Float::kFloat16) return launch_streams(streams, static_cast<__half*>(matrix.out), stream);
  if (matrix.type == Float::kBfloat16) return launch_streams(streams, static_cast<__nv_bfloat16*>(matrix.out), stream);
  return launch_streams(streams, static_cast<float*>(matrix.out), stream);
}

}  // namespace qload::cuda
