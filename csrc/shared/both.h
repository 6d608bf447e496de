// Qualifiers of functions for both the host compiler and nvcc.
#pragma once

#ifdef __CUDACC__
#define QLOAD_BOTH __host__ __device__
#else
#define QLOAD_BOTH
#endif
