// The kernels of many.cuh for bf16 and 4 bits.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_of<__nv_bfloat16, Code::kUint4>(const Many& call);

}  // namespace qload::cuda
