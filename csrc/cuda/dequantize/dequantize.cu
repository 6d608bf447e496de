// Launches: one kernel for each width of codes, type of the result and arithmetic.
#include "dequantize.h"

#include <algorithm>

#include "../device/launch.h"
#include "general.cuh"
#include "rows.cuh"
#include "single.cuh"
#include "table.cuh"
#include "tiles.cuh"

namespace qload::cuda {
namespace {

constexpr int64_t kMostRows = 65535;

/// Replace divisions by powers of two with shifts.
Meaning shifted(Meaning meaning) {
  int shift = 0;
  while (shift < 31 && int64_t{1} << shift < meaning.k_run) ++shift;
  meaning.k_shift = !meaning.k_table && int64_t{1} << shift == meaning.k_run ? shift : -1;
  return meaning;
}

/// Whether 16-bit numbers represent codes, zero points and scales exactly.
template <class Out, int bits>
bool takes_pairs(const Meaning& meaning) {
  if (bits > Pairs<Out>::most_bits || meaning.zeros_kind == static_cast<int>(Zeros::kInt32)) return false;
  const auto scale = static_cast<Float>(meaning.scale_type);
  return scale == Float::kFloat16 || (scale == Float::kBfloat16 && std::is_same_v<Out, __nv_bfloat16>);
}

struct Call {
  const Plan& plan;
  const Meaning& meaning;
  const Tiles& tiles;
  const uint32_t* codes;
  cudaStream_t stream;
};

template <class Out, int bits, int register_bits>
cudaError_t launch_tiles(const Call& call, bool pairs, Out* out) {
  auto* kernel = dequantize_tiles<Out, bits, register_bits, Arithmetic::kFloat>;
  if constexpr (bits <= Pairs<Out>::most_bits)
    if (pairs) kernel = dequantize_tiles<Out, bits, register_bits, Arithmetic::kPairs>;
  const int words = kThreads << register_bits, bytes = 4 * words + (8 * words >> call.tiles.same);
  const bool early = this_device().major >= 9;  // an early start costs no time, and the kernel waits before it reads
  return launch(kernel, dim3(static_cast<unsigned>(call.plan.blocks)), kThreads, bytes, 1, early, call.stream,
                call.plan, call.meaning, call.tiles, call.codes, out);
}

template <class Out, int bits>
cudaError_t launch(const std::vector<Digit>& digits, int row_bits, const Meaning& meaning, const void* codes,
                   const Matrix& matrix, cudaStream_t stream) {
  constexpr int inside_log = bits == 8 ? 2 : bits == 4 ? 3 : 4;
  const bool pairs = takes_pairs<Out, bits>(meaning);
  const bool simple =
      !meaning.divide && meaning.factor == 1 && !meaning.lookup && !meaning.n_table && meaning.n_run == 1 && !meaning.offsets;
  const auto start = reinterpret_cast<uintptr_t>(codes);
  auto* out = static_cast<Out*>(matrix.out);
  Plan plan;
  Tiles tiles{matrix.K, row_bits - inside_log};
  const Call call{plan, meaning, tiles, static_cast<const uint32_t*>(codes), stream};
  if (!make_packed(bits, digits, start, pairs && simple, plan, tiles.paired)) return cudaErrorNotSupported;
  if (fill_tiles(plan, meaning, matrix, bits, tiles) && simple) {
    if (plan.register_bits == 3) return launch_tiles<Out, bits, 3>(call, pairs, out);
    return launch_tiles<Out, bits, bits == 8 ? 3 : 4>(call, pairs, out);
  }
  if (tiles.paired) {
    make_packed(bits, digits, start, false, plan, tiles.paired);
    fill_tiles(plan, meaning, matrix, bits, tiles);
  }
  tiles.grouped = simple && meaning.k_table && meaning.k_table % 16 == 0;
  dequantize_any<Out, bits><<<static_cast<unsigned>(plan.blocks), 1 << plan.thread_bits, 0, stream>>>(
      plan, meaning, tiles, call.codes, out);
  return cudaGetLastError();
}

/// Whether eight codes at a time can be loaded and stored; `bytes`: size of a lane's load.
bool fits_rows(const Rows& rows, const Meaning& meaning, const void* out, int bytes) {
  const auto start = reinterpret_cast<uintptr_t>(rows.codes), end = reinterpret_cast<uintptr_t>(out);
  return rows.K % kTogether == 0 && start % bytes == 0 && rows.pitch % bytes == 0 && end % 16 == 0 &&
         meaning.k_table % 16 == 0 && meaning.factors % 16 == 0 && rows.N * rows.K < int64_t{1} << 40;
}

template <class Out, Source source>
cudaError_t launch_rows(const Rows& rows, const Meaning& meaning, Out* out, cudaStream_t stream) {
  constexpr int warps = kRowsThreads / 32;
  const int64_t across = (rows.K + 32 * kTogether - 1) / (32 * kTogether);
  const int64_t turns = across * ((rows.N + kRowsOfTurn - 1) / kRowsOfTurn);
  int64_t blocks = (turns + warps - 1) / warps;
  if (Reading<source>::entries) blocks = std::min<int64_t>(blocks, this_device().multiprocessors * kRowsBlocks);
  dequantize_rows<Out, source><<<static_cast<unsigned>(blocks), kRowsThreads, 0, stream>>>(meaning, rows, out);
  return cudaGetLastError();
}

template <class Out>
cudaError_t launch_source(Source source, const Rows& rows, const Meaning& meaning, Out* out, cudaStream_t stream) {
  switch (source) {
    case Source::kUnsigned:
      return launch_rows<Out, Source::kUnsigned>(rows, meaning, out, stream);
    case Source::kSigned:
      return launch_rows<Out, Source::kSigned>(rows, meaning, out, stream);
    case Source::kLooked:
      return launch_rows<Out, Source::kLooked>(rows, meaning, out, stream);
    case Source::kPairs:
      return launch_rows<Out, Source::kPairs>(rows, meaning, out, stream);
    case Source::kPairsTurned:
      return launch_rows<Out, Source::kPairsTurned>(rows, meaning, out, stream);
    case Source::kHalves:
      return launch_rows<Out, Source::kHalves>(rows, meaning, out, stream);
    case Source::kSparse:
      return launch_rows<Out, Source::kSparse>(rows, meaning, out, stream);
  }
  return cudaErrorInvalidValue;
}

/// Bytes of a lane's load of eight codes.
int bytes_of(Source source) {
  if (source == Source::kSparse) return 2;
  return source == Source::kPairs || source == Source::kPairsTurned ? 4 : 8;
}

template <class Out, class Code>
cudaError_t launch_single(const Single& single, const Meaning& meaning, const void* codes, void* out,
                          cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((single.K + kTile - 1) / kTile),
                    static_cast<unsigned>(std::min(kMostRows, (single.N + kTile - 1) / kTile)));
  dequantize_single<Out, Code><<<blocks, dim3(kTile, kTileRows), 0, stream>>>(
      meaning, single, static_cast<const Code*>(codes), static_cast<Out*>(out));
  return cudaGetLastError();
}

template <class Out>
cudaError_t launch_codes(int bytes, const Single& single, const Meaning& meaning, const void* codes, void* out,
                         cudaStream_t stream) {
  switch (bytes) {
    case 1:
      return launch_single<Out, uint8_t>(single, meaning, codes, out, stream);
    case -1:
      return launch_single<Out, int8_t>(single, meaning, codes, out, stream);
    case -2:
      return launch_single<Out, int16_t>(single, meaning, codes, out, stream);
    case -4:
      return launch_single<Out, int32_t>(single, meaning, codes, out, stream);
    case -8:
      return launch_single<Out, int64_t>(single, meaning, codes, out, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Call>
cudaError_t with_type(Float type, const Call& call) {
  if (type == Float::kFloat16) return call(__half{});
  if (type == Float::kBfloat16) return call(__nv_bfloat16{});
  return call(float{});
}

}  // namespace

cudaError_t dequantize(int bits, const std::vector<Digit>& digits, int row_bits, const Meaning& meaning,
                       const void* codes, const Matrix& matrix, cudaStream_t stream) {
  bool empty = false;
  const std::vector<Digit> all = merged(digits, empty);
  if (empty) return cudaSuccess;
  if ((matrix.N << row_bits) * bits / 32 >= int64_t{1} << 32) return cudaErrorNotSupported;
  const Meaning meant = shifted(meaning);
  return with_type(matrix.type, [&](auto out) {
    using Out = decltype(out);
    if (bits == 2) return launch<Out, 2>(all, row_bits, meant, codes, matrix, stream);
    if (bits == 4) return launch<Out, 4>(all, row_bits, meant, codes, matrix, stream);
    return launch<Out, 8>(all, row_bits, meant, codes, matrix, stream);
  });
}

cudaError_t dequantize_table(const void* codes, const float* table, const float* scales, int block_bits,
                             const Matrix& matrix, cudaStream_t stream) {
  const int64_t count = matrix.N * matrix.K;
  if (count == 0) return cudaSuccess;
  return with_type(matrix.type, [&](auto out) {
    using Out = decltype(out);
    constexpr int64_t each = kThreads * kTableWords * kTableCodes;
    dequantize_table<Out><<<static_cast<unsigned>((count + each - 1) / each), kThreads, 0, stream>>>(
        static_cast<const uint32_t*>(codes), table, scales, block_bits, count, static_cast<Out*>(matrix.out));
    return cudaGetLastError();
  });
}

cudaError_t dequantize_single(int bytes, int64_t stride_n, int64_t stride_k, const Meaning& meaning,
                              const void* codes, const Matrix& matrix, cudaStream_t stream) {
  if (matrix.N * matrix.K == 0) return cudaSuccess;
  const Source source = meaning.lookup ? Source::kLooked : bytes == 1 ? Source::kUnsigned : Source::kSigned;
  if (stride_k == 1 && (bytes == 1 || (bytes == -1 && !meaning.lookup)) &&
      dequantize_rows(static_cast<int>(source), {codes, stride_n, nullptr, 0}, meaning, matrix, stream) == cudaSuccess)
    return cudaSuccess;
  const Single single{matrix.N, matrix.K, stride_n, stride_k};
  return with_type(matrix.type, [&](auto out) {
    return launch_codes<decltype(out)>(bytes, single, shifted(meaning), codes, matrix.out, stream);
  });
}

cudaError_t dequantize_rows(int source, const StoredRows& stored, const Meaning& meaning, const Matrix& matrix,
                            cudaStream_t stream) {
  if (matrix.N * matrix.K == 0) return cudaSuccess;
  const auto kind = static_cast<Source>(source);
  const Rows rows{matrix.N,     matrix.K,
                  static_cast<const uint8_t*>(stored.codes),  stored.pitch,
                  static_cast<const uint8_t*>(stored.places), stored.places_pitch};
  if (!fits_rows(rows, meaning, matrix.out, bytes_of(kind))) return cudaErrorNotSupported;
  return with_type(matrix.type, [&](auto out) {
    using Out = decltype(out);
    return launch_source<Out>(kind, rows, shifted(meaning), static_cast<Out*>(matrix.out), stream);
  });
}

}  // namespace qload::cuda
