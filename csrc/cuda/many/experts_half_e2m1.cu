// The kernels of many.cuh for experts, fp16 and e2m1.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__half, Code::kE2m1>(const Many& call);

}  // namespace qload::cuda
