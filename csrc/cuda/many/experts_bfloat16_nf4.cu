// The kernels of many.cuh for experts, bf16 and tables of 16.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__nv_bfloat16, Code::kNf4>(const Many& call);

}  // namespace qload::cuda
