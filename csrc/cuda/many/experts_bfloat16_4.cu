// The kernels of many.cuh for experts, bf16 and 4 bits.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__nv_bfloat16, Code::kUint4>(const Many& call);

}  // namespace qload::cuda
