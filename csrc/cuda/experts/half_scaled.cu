// The kernels of experts.cuh for fp16 and scaled numbers.
#include "kernels.cuh"

namespace qload::cuda {

template ExpertsKernel scaled_experts_of<__half>(const Experts& call);

}  // namespace qload::cuda
