// The kernels of many.cuh for bf16 and tables of 16.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_of<__nv_bfloat16, Code::kNf4>(const Many& call);

}  // namespace qload::cuda
