// Launches of middle.cuh: what copies read, how a ring is laid out, and the list of kernels.
#include "middle.h"

#include <algorithm>

#include "../device/encode.h"
#include "../device/launch.h"
#include "middle.cuh"

namespace qload::cuda {
namespace {

using namespace middle_room;

using Kernel = void (*)(const Matrices, const Middle, const Work);

constexpr int kShared = 227 << 10, kOwn = 1024;  // of a multiprocessor, and what is of a block beside its ring

struct Shape {
  int tokens, strips, together;
  int columns() const { return strips * 2 * kTile; }
};

template <class T, int bits, bool has_zeros>
Kernel of_shape(const Shape& shape) {
  if (shape.tokens == 128) return middle_kernel<T, bits, has_zeros, 128, 2, 1>;
  if (shape.strips == 4) return middle_kernel<T, bits, has_zeros, 64, 4, 1>;
  if (shape.tokens == 64) return middle_kernel<T, bits, has_zeros, 64, 2, 1>;
  return shape.together == 2 ? middle_kernel<T, bits, has_zeros, 32, 2, 2>
                             : middle_kernel<T, bits, has_zeros, 32, 2, 1>;
}

template <class T, int bits>
Kernel of_width(const Middle& call, const Shape& shape) {
  return call.zeros ? of_shape<T, bits, true>(shape) : of_shape<T, bits, false>(shape);
}

template <class T>
Kernel kernel_of(const Middle& call, const Shape& shape) {
  return call.bits == 4 ? of_width<T, 4>(call, shape) : of_width<T, 8>(call, shape);
}

/// A matrix of rows side by side, in boxes.
bool describe(CUtensorMap& map, const void* at, CUtensorMapDataType type, int size, int64_t columns, int64_t rows,
              int box_columns, int box_rows, bool swizzled = false) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(columns) * size};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, one[2] = {1, 1};
  return encode()(&map, type, 2, const_cast<void*>(at), sizes, pitch, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool describe(const Middle& call, int tokens, const Work& work, Matrices& matrices) {
  const int groups = (call.K + call.group - 1) / call.group;
  return encode() &&
         describe(matrices.inputs, call.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.inputs, call.M, kStage, tokens,
                  true) &&
         describe(matrices.weights, call.weights, CU_TENSOR_MAP_DATA_TYPE_INT64, 8,
                  int64_t{call.N} * call.bits / 4, call.K / 16, 256, kSteps) &&
         describe(matrices.scales, call.scales, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.N, groups, kQuad * kTile,
                  work.group_rows) &&
         (!call.zeros || describe(matrices.zeros, call.zeros, CU_TENSOR_MAP_DATA_TYPE_INT32, 4,
                                  int64_t{call.N} * call.bits / 32, groups, kQuad * 2 * call.bits, work.group_rows));
}

Work lay_out(const Middle& call, const Shape& shape, int split) {
  Work work{};
  const int tiles = shape.strips * 2;
  work.all = call.K / kStage, work.split = split, work.group = call.group, work.has_zeros = call.zeros != nullptr;
  work.group_rows = call.group < kStage ? kStage / call.group : 1;
  work.scales_at = shape.tokens * kStage * 2 + kSteps * tiles * 128 * call.bits;
  work.zeros_at = work.scales_at + work.group_rows * tiles * kTile * 2;
  const int end = work.zeros_at + (call.zeros ? work.group_rows * tiles * 8 * call.bits : 0);
  work.stage_bytes = (end + 1023) / 1024 * 1024;
  work.stages = std::min(kMostStages, (kShared / shape.together - 2 * kOwn) / work.stage_bytes);
  return work;
}

}  // namespace

cudaError_t middle(const Middle& call, cudaStream_t stream) {
  if (call.M == 0 || call.outputs == 0) return cudaSuccess;
  if (this_device().major != 9 || call.K % kStage || call.N % kTile || call.inputs % 8)
    return cudaErrorNotSupported;
  const int split = call.split ? call.split : 1;
  const int tokens = call.M <= 32 ? 32 : call.M <= 64 ? 64 : 128;
  const Shape shape{tokens, call.columns == 512 && tokens == 64 ? 4 : 2, call.together == 2 && tokens == 32 ? 2 : 1};
  const Work work = lay_out(call, shape, split);
  Matrices matrices{};
  if (split > kMostSplit || split > call.K / kStage || !describe(call, tokens, work, matrices))
    return cudaErrorNotSupported;

  const Kernel kernel = call.bfloat16 ? kernel_of<__nv_bfloat16>(call, shape) : kernel_of<__half>(call, shape);
  const int sums = split > 1 ? shape.columns() * tokens * 4 : (shape.columns() + 8) * tokens * 2;  // where the ring was
  const int shared = std::max(work.stages * work.stage_bytes, sums);
  const cudaError_t raised = allow_shared(reinterpret_cast<const void*>(kernel), kShared - kOwn);
  if (raised != cudaSuccess) return raised;
  const dim3 grid(split, (call.M + tokens - 1) / tokens, (call.N + shape.columns() - 1) / shape.columns());
  return launch(kernel, grid, kMultiply + kFill, shared, split, call.early, stream, matrices, call, work);
}

}  // namespace qload::cuda
