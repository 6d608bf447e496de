// The kernels of many.cuh for experts, fp16 and tables of 16.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__half, Code::kNf4>(const Many& call);

}  // namespace qload::cuda
