// The kernels of experts.cuh for bf16 and integers.
#include "kernels.cuh"

namespace qload::cuda {

template ExpertsKernel integer_experts_of<__nv_bfloat16>(const Experts& call, bool small);

}  // namespace qload::cuda
