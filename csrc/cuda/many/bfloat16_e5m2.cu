// The kernels of many.cuh for bf16 and e5m2.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_of<__nv_bfloat16, Code::kE5m2>(const Many& call);

}  // namespace qload::cuda
