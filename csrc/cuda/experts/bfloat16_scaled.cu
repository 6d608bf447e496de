// The kernels of experts.cuh for bf16 and scaled numbers.
#include "kernels.cuh"

namespace qload::cuda {

template ExpertsKernel scaled_experts_of<__nv_bfloat16>(const Experts& call);

}  // namespace qload::cuda
