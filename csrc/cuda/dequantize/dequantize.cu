// Launches of dequantize.cuh: a kernel for each width of a code and each type of the result.
#include "dequantize.h"

#include <algorithm>

#include "dequantize.cuh"

namespace qload::cuda {
namespace {

constexpr int kRegisterBits = 4;  // as many loads are in flight; 2 bits need as many
constexpr int64_t kMostRows = 65535;

template <class Out, int bits>
cudaError_t launch(const Plan& plan, const Meaning& meaning, const Rows& rows, const void* codes, void* out,
                   cudaStream_t stream) {
  if (plan.register_bits > kRegisterBits) return cudaErrorNotSupported;
  const bool simple = rows.whole && rows.same >= kLeastSame && !meaning.divide && meaning.factor == 1;
  const bool zeros = meaning.zeros_kind != static_cast<int>(Zeros::kNone);
  auto* kernel = dequantize_tiles<Out, bits, kRegisterBits, Rule::kGeneral>;
  if (simple && !meaning.lookup) kernel = dequantize_tiles<Out, bits, kRegisterBits, Rule::kPlain>;
  if (simple && meaning.lookup && !zeros) kernel = dequantize_tiles<Out, bits, kRegisterBits, Rule::kTable>;
  kernel<<<static_cast<unsigned>(plan.blocks), 1 << plan.thread_bits, 0, stream>>>(
      plan, meaning, rows, static_cast<const uint32_t*>(codes), static_cast<Out*>(out));
  return cudaGetLastError();
}

/// The meaning, with what a division by a power of two saves.
Meaning shifted(Meaning meaning) {
  int shift = 0;
  while (shift < 31 && int64_t{1} << shift < meaning.k_run) ++shift;
  meaning.k_shift = !meaning.k_table && int64_t{1} << shift == meaning.k_run ? shift : -1;
  return meaning;
}

template <class Out>
cudaError_t launch_bits(int bits, const Plan& plan, const Meaning& meaning, const Rows& rows, const void* codes,
                        void* out, cudaStream_t stream) {
  if (bits == 2) return launch<Out, 2>(plan, meaning, rows, codes, out, stream);
  if (bits == 4) return launch<Out, 4>(plan, meaning, rows, codes, out, stream);
  return launch<Out, 8>(plan, meaning, rows, codes, out, stream);
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

cudaError_t dequantize(int bits, const std::vector<Digit>& digits, int row_bits, bool high_first,
                       const Meaning& meaning, const void* codes, const Matrix& matrix, cudaStream_t stream) {
  bool empty = false;
  const std::vector<Digit> all = merged(digits, empty);
  if (empty) return cudaSuccess;
  Plan plan;
  if ((matrix.N << row_bits) * bits / 32 >= int64_t{1} << 32) return cudaErrorNotSupported;
  if (!make_plan(bits, all, reinterpret_cast<uintptr_t>(codes), 0, kRegisterBits, plan, 0) || plan.unit != 4)
    return cudaErrorNotSupported;
  const int size = matrix.type == Float::kFloat32 ? 4 : 2;
  Rows rows{matrix.K, row_bits, high_first, false, 0};
  rows.whole = reinterpret_cast<uintptr_t>(matrix.out) % 16 == 0 && matrix.K * size % 16 == 0;
  while (!meaning.k_table && rows.same < plan.thread_bits && plan.to_bit[rows.same] == 1 << rows.same &&
         meaning.k_run % (int64_t{64 / bits} << rows.same) == 0)
    ++rows.same;
  return with_type(matrix.type, [&](auto out) {
    return launch_bits<decltype(out)>(bits, plan, shifted(meaning), rows, codes, matrix.out, stream);
  });
}

cudaError_t dequantize_single(int bytes, int64_t stride_n, int64_t stride_k, const Meaning& meaning,
                              const void* codes, const Matrix& matrix, cudaStream_t stream) {
  if (matrix.N * matrix.K == 0) return cudaSuccess;
  const Single single{matrix.N, matrix.K, stride_n, stride_k};
  return with_type(matrix.type, [&](auto out) {
    return launch_codes<decltype(out)>(bytes, single, shifted(meaning), codes, matrix.out, stream);
  });
}

}  // namespace qload::cuda
