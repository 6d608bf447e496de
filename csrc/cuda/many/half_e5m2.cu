// The kernels of many.cuh for fp16 and e5m2.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_of<__half, Code::kE5m2>(const Many& call);

}  // namespace qload::cuda
