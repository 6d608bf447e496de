// Launches of many.cuh: the descriptors of bulk copies and the layout of the rings.
#include "many.h"

#include <algorithm>

#include "../device/encode.h"
#include "../device/launch.h"
#include "many.cuh"
#include "w8a8.cuh"

namespace qload::cuda {
namespace {

using namespace many_room;

constexpr int kShared = (227 << 10) - 2048;  // bytes of a block

bool describe(CUtensorMap& map, const void* at, CUtensorMapDataType type, int dimensions, const cuuint64_t* sizes,
              const cuuint64_t* pitches, const cuuint32_t* box) {
  const cuuint32_t one[3] = {1, 1, 1};
  return encode()(&map, type, dimensions, const_cast<void*>(at), sizes, pitches, box, one,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool describe(const Many& call, Matrices& matrices) {
  if (!encode()) return false;
  const int bits = bits_of(call.code);
  const cuuint64_t inputs = call.inputs, rows = call.M, lines = int64_t{call.K} * bits / 16, words = 32;
  const cuuint64_t tiles = int64_t{call.N / kTile} * (call.items ? call.experts : 1);
  const cuuint32_t element = call.coded ? 1 : 2, row = kBox * 2 / element;
  const auto type = call.coded ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const cuuint64_t x_sizes[2] = {inputs, rows}, x_pitch[1] = {inputs * element};
  const cuuint64_t sizes[3] = {words, lines, tiles}, pitches[2] = {words * 4, lines * words * 4};
  const cuuint32_t tokens = call.tokens, columns = call.columns;
  const cuuint32_t rows_of_box = call.neighbours ? tokens / 2 : tokens;  // a last tile has its own size
  const cuuint32_t left = call.items ? 0 : call.M % rows_of_box, some[2] = {row, rows_of_box}, last[2] = {row, left};
  const cuuint32_t box[3] = {32, static_cast<cuuint32_t>(kStage * bits / 16), columns / kTile};
  return describe(matrices.inputs, call.x, type, 2, x_sizes, x_pitch, some) &&
         (last[1] == 0 ||
          describe(matrices.last_inputs, call.x, type, 2, x_sizes, x_pitch, last)) &&
         describe(matrices.weights, call.weights, CU_TENSOR_MAP_DATA_TYPE_INT32, 3, sizes, pitches, box);
}

/// False: the rings lack room for two stages.
bool lay_out(const Many& call, Work& work) {
  const int columns = call.columns, bits = bits_of(call.code);
  const int x_bytes = call.tokens * kBox * 2, stage = columns / kTile * tile_bytes(bits);
  const int all = call.K / kStage;
  for (int both = 0; both < 2; ++both) {
    const int shares = call.slices * (1 + both);
    work.each[both] = all / shares, work.more[both] = all % shares;
  }
  const bool scaled = is_scaled(call.code);  // the scales of a stage are contiguous
  work.group = call.group, work.group_rows = call.group < kStage && !scaled ? kStage / call.group : 1;
  work.scale_bytes = scaled ? columns * column_scale_bytes(call.code, call.group) : is_number(call.code) ? 0 : work.group_rows * columns * 2;
  work.zero_bytes = call.zeros && !scaled ? work.group_rows * columns * zero_width(bits, call.offset_zero >= 0) / 8 : 0;
  const int beside = work.scale_bytes + work.zero_bytes;
  const int rings = kShared - multiplying(columns, call.teams) / 128 * kTransposeBytes;
  // As many rows of x as of weights, but only as many weights as keep memory busy.
  const int as_many = rings / ((call.coded ? 1 : 2) * x_bytes + stage + beside);
  work.stages = std::min({kMostStages, std::max({3, as_many, (64 << 10) / stage}), std::max(3, (80 << 10) / stage)});
  // Each slot belongs to one team. Otherwise a team could wait for the next phase of a slot before the other team's phase
  // has ended, and the parity of both is equal. Each team has two slots: it releases one with the next.
  work.stages -= work.stages % call.teams;
  work.boxes = std::min(kMostBoxes, (rings - work.stages * (stage + beside)) / x_bytes);
  work.boxes -= work.boxes % (2 * call.teams);
  work.weights_at = work.boxes * x_bytes;
  work.scales_at = work.weights_at + work.stages * stage;
  work.zeros_at = work.scales_at + work.stages * work.scale_bytes;
  work.transpose_at = (work.zeros_at + work.stages * work.zero_bytes + 15) / 16 * 16;
  return work.boxes >= 2 * call.teams && work.stages >= 2 * call.teams && all >= call.slices * (call.pairs ? 2 : 1) * call.teams;
}

/// Set tiles and blocks: as many blocks as run at once, but for pairs and teams, which add their sums in the buffer of
/// the next tile.
dim3 divide(const Many& call, Work& work) {
  const bool halves = call.turns == Turns::kLast;
  const int two = call.pairs || call.neighbours ? 2 : 1, places = std::max(1, this_device().multiprocessors / two);
  const int wide = call.columns * (call.neighbours || halves ? 2 : 1);
  work.tall = call.items ? call.most_items : (call.M + call.tokens - 1) / call.tokens;
  work.wide = (call.N + wide - 1) / wide;
  const int tiles = work.tall * work.wide * call.slices * (halves ? 2 : 1), last = tiles % places;
  work.places = places;
  work.items = tiles, work.wholes = call.pairs ? 0 : tiles;
  if (call.pairs && call.neighbours) {
    const bool shared = 2 * last <= places;
    work.wholes = shared ? tiles - last : tiles, work.items = shared ? tiles + last : tiles;
  }
  const int blocks = work.wholes == 0 || call.teams > 1 ? work.items : std::min(work.items, places), most = 1 << 15;
  return dim3(two, (blocks + most - 1) / most, std::min(blocks, most));
}

template <Code code>
ManyKernel kernel_of(const Many& call) {
  return call.bfloat16 ? many_of<__nv_bfloat16, code>(call) : many_of<__half, code>(call);
}

template <Code code>
ManyKernel of_codes(const Many& call) {
  return call.bfloat16 ? w8a8_of<__nv_bfloat16, code>(call) : w8a8_of<__half, code>(call);
}

template <Code code>
ManyKernel experts_of(const Many& call) {
  return call.bfloat16 ? many_experts_of<__nv_bfloat16, code>(call) : many_experts_of<__half, code>(call);
}

ManyKernel kernel_of(const Many& call) {
  if (call.coded)
    return call.items                 ? nullptr
           : call.code == Code::kE4m3 ? of_codes<Code::kE4m3>(call)
           : call.code == Code::kInt8 ? of_codes<Code::kInt8>(call)
                                      : nullptr;
  switch (call.code) {
    case Code::kUint4: return call.items ? experts_of<Code::kUint4>(call) : kernel_of<Code::kUint4>(call);
    case Code::kUint8: return call.items ? experts_of<Code::kUint8>(call) : kernel_of<Code::kUint8>(call);
    case Code::kInt8: return call.items ? experts_of<Code::kInt8>(call) : kernel_of<Code::kInt8>(call);
    case Code::kE4m3: return call.items ? experts_of<Code::kE4m3>(call) : kernel_of<Code::kE4m3>(call);
    case Code::kE5m2: return call.items ? nullptr : kernel_of<Code::kE5m2>(call);
    case Code::kMxfp8: return call.items ? experts_of<Code::kMxfp8>(call) : kernel_of<Code::kMxfp8>(call);
    case Code::kE2m1: return call.items ? experts_of<Code::kE2m1>(call) : kernel_of<Code::kE2m1>(call);
    case Code::kNf4:
    case Code::kBnbFp4: return call.items ? experts_of<Code::kNf4>(call) : kernel_of<Code::kNf4>(call);
  }
  return nullptr;
}

template <class T>
cudaError_t added(const Many& call, cudaStream_t stream) {
  const int64_t blocks = (int64_t{call.M} * (call.N / 4) + kAddThreads - 1) / kAddThreads;
  const dim3 grid(static_cast<unsigned>(blocks));
  return launch(add_slices<T, Many>, grid, kAddThreads, 0, 1, call.early, stream, call);
}

/// Whether kernels exist for the scales of a call.
bool fits(const Many& call) {
  if (call.offset_zero >= 0 && (!call.zeros || is_number(call.code) || call.items)) return false;
  if (is_scaled(call.code)) return call.zeros && has_scales_of(call.code, call.group);
  return !is_number(call.code) || (!call.zeros && (call.group == kStage || call.group >= call.K));
}

}  // namespace

cudaError_t many(const Many& call, cudaStream_t stream) {
  if (call.M == 0 || call.outputs == 0) return cudaSuccess;
  const ManyKernel kernel = kernel_of(call);
  if (this_device().major != 9 || !kernel || call.K % kStage || call.N % kTile || call.inputs % (call.coded ? 32 : 8) || call.slices < 1 ||
      (call.slices > 1 && (!call.parts || call.items || (call.pairs && call.neighbours))) ||
      !fits(call) ||
      (call.neighbours && (call.items || call.teams > 1)) || (call.turns != Turns::kAll && (!call.items || call.pairs)))
    return cudaErrorNotSupported;
  Work work{};
  Matrices matrices{};
  if (!lay_out(call, work) || !describe(call, matrices)) return cudaErrorNotSupported;

  const dim3 grid = divide(call, work);
  const cudaError_t raised = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
  if (raised != cudaSuccess) return raised;
  const cudaError_t started =
      launch(kernel, grid, multiplying(call.columns, call.teams) + kFill, kShared, grid.x, call.early, stream, work, call, matrices);
  if (started != cudaSuccess || call.slices == 1) return started;
  return call.bfloat16 ? added<__nv_bfloat16>(call, stream) : added<__half>(call, stream);
}

}  // namespace qload::cuda
