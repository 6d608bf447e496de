// The kernels of mma.cuh for x in fp16.
#include "kernels.cuh"

namespace qload::cuda {

template MmaKernel mma_of<__half>(const Mma& call);

}  // namespace qload::cuda
