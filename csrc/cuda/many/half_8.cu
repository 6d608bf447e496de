// The kernels of many.cuh for fp16 and 8 bits.
#include "kernels.cuh"

namespace qload::cuda {

template ManyKernel many_of<__half, Code::kUint8>(const Many& call);

}  // namespace qload::cuda
