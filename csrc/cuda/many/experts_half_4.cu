// The kernels of many.cuh for experts, fp16 and 4 bits.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_experts_of<__half, Code::kUint4>(const Many& call);

}  // namespace qload::cuda
