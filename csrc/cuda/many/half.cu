// The kernels of many.cuh for fp16.
#include "kernels.cuh"

namespace qload::cuda {

ManyKernel many_of_half(const Many& call) { return many_of<__half>(call); }

}  // namespace qload::cuda
