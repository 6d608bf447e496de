// The kernels of experts.cuh for fp16 and numbers.
#include "kernels.cuh"

namespace qload::cuda {

template ExpertsKernel number_experts_of<__half>(const Experts& call);

}  // namespace qload::cuda
