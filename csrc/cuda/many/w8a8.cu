// The kernels of w8a8.cuh.
#include "w8a8.cuh"

namespace qload::cuda {

template <class T, Code code>
ManyKernel w8a8_of(const Many& call) {
#define QLOAD_SHAPE(m, n) \
  if (call.tokens == m && call.columns == n && call.teams == 1) return many_room::w8a8_kernel<T, code, m, n>;
  QLOAD_SHAPE(64, 128) QLOAD_SHAPE(128, 128) QLOAD_SHAPE(192, 128) QLOAD_SHAPE(256, 128)
#undef QLOAD_SHAPE
  return nullptr;
}

template ManyKernel w8a8_of<__half, Code::kE4m3>(const Many& call);
template ManyKernel w8a8_of<__half, Code::kInt8>(const Many& call);
template ManyKernel w8a8_of<__nv_bfloat16, Code::kE4m3>(const Many& call);
template ManyKernel w8a8_of<__nv_bfloat16, Code::kInt8>(const Many& call);

}  // namespace qload::cuda
