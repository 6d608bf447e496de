// The kernels of many.cuh for bf16.
#include "kernels.cuh"

namespace qload::cuda {

ManyKernel many_of_bfloat16(const Many& call) { return many_of<__nv_bfloat16>(call); }

}  // namespace qload::cuda
