// The kernels of mma.cuh for x in bf16.
#include "kernels.cuh"

namespace qload::cuda {

template MmaKernel mma_of<__nv_bfloat16>(const Mma& call);

}  // namespace qload::cuda
