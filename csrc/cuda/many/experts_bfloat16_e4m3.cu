// The kernels of many.cuh for experts, bf16 and e4m3.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__nv_bfloat16, Code::kE4m3>(const Many& call);

}  // namespace qload::cuda
