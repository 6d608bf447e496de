// The kernels of many.cuh for experts, bf16 and int8.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__nv_bfloat16, Code::kInt8>(const Many& call);

}  // namespace qload::cuda
