// The kernels of experts.cuh for fp16 and integers.
#include "kernels.cuh"

namespace qload::cuda {

template ExpertsKernel integer_experts_of<__half>(const Experts& call, bool small);

}  // namespace qload::cuda
