// What a function is that the host compiler and nvcc both read.
#pragma once

#ifdef __CUDACC__
#define QLOAD_BOTH __host__ __device__
#else
#define QLOAD_BOTH
#endif
