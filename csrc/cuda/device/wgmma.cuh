// Matrix products of four warps on Hopper, with a 64-row operand in registers and the other one in shared memory.
//
// Each warp has 16 of the 64 rows, in registers as for mma.m16n8k16; its sums are consecutive m16n8 tiles. Operands and
// sums must not be touched before `wait_for_products` returns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"

namespace qload::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define QLOAD_WGMMA 1
#else
#define QLOAD_WGMMA 0
#endif

/// Descriptor of rows of 64 elements: 128 bytes each, swizzled as TMA does, in groups of eight rows. The next 16 elements
/// along a row are at descriptor + 2.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* rows) {
  const uint64_t address = (shared_address(rows) & 0x3FFFF) >> 4, next_eight = 1024 >> 4, swizzle_128 = 1;
  return address | uint64_t{1} << 16 | next_eight << 32 | swizzle_128 << 62;
}

/// Order earlier register writes before the next products.
__device__ __forceinline__ void fence_products() {
#if QLOAD_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// Close a group of products.
__device__ __forceinline__ void group_products() {
#if QLOAD_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// Wait for all groups but the last `left`.
template <int left>
__device__ __forceinline__ void wait_for_products() {
#if QLOAD_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
#endif
}

/// Release registers of four warps, or wait for more; `count` per thread.
template <int count>
__device__ __forceinline__ void release_registers() {
#if QLOAD_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
#endif
}

template <int count>
__device__ __forceinline__ void acquire_registers() {
#if QLOAD_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
#endif
}

/// Store four 8 x 8 matrices of 16-bit elements transposed; lane i passes the address of column i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed(void* column, const uint32_t (&from)[4]) {
#if QLOAD_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
#endif
}

#define QLOAD_8(kind, i)                                                                              \
  kind(sum[i]), kind(sum[i + 1]), kind(sum[i + 2]), kind(sum[i + 3]), kind(sum[i + 4]), kind(sum[i + 5]), \
      kind(sum[i + 6]), kind(sum[i + 7])
#define QLOAD_16(kind, i) QLOAD_8(kind, i), QLOAD_8(kind, i + 8)
#define QLOAD_32(kind, i) QLOAD_16(kind, i), QLOAD_16(kind, i + 16)
#define QLOAD_64(kind, i) QLOAD_32(kind, i), QLOAD_32(kind, i + 32)
#define QLOAD_16_SUMS(i) QLOAD_16("+f", i)
#define QLOAD_32_SUMS(i) QLOAD_32("+f", i)
#define QLOAD_16_NAMES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define QLOAD_32_NAMES \
  QLOAD_16_NAMES ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QLOAD_48_NAMES \
  QLOAD_32_NAMES ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define QLOAD_64_NAMES \
  QLOAD_48_NAMES ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QLOAD_80_NAMES                                                                                          \
  QLOAD_64_NAMES ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define QLOAD_96_NAMES                                                                                          \
  QLOAD_64_NAMES ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
                 "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define QLOAD_112_NAMES                                                                                         \
  QLOAD_96_NAMES ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define QLOAD_128_NAMES                                                                                         \
  QLOAD_96_NAMES ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
                 "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
                 "%126, %127"
#define QLOAD_PRODUCT(n, type, names, operand, ...)                                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names "}, " operand         \
               ", 1, 1, 1, 0;"                                                                                  \
               : __VA_ARGS__                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#if QLOAD_WGMMA
#define QLOAD_PRODUCTS(n, values, names, operand, ...)                                                    \
  __device__ __forceinline__ void multiply_async(float(&sum)[values], const uint32_t(&a)[4], uint64_t b, __half) { \
    QLOAD_PRODUCT(n, "f16", names, operand, __VA_ARGS__);                                                 \
  }                                                                                                       \
  __device__ __forceinline__ void multiply_async(float(&sum)[values], const uint32_t(&a)[4], uint64_t b,  \
                                                 __nv_bfloat16) {                                         \
    QLOAD_PRODUCT(n, "bf16", names, operand, __VA_ARGS__);                                                \
  }
#else
#define QLOAD_PRODUCTS(n, values, names, operand, ...)                                                    \
  template <class T>                                                                                      \
  __device__ __forceinline__ void multiply_async(float (&)[values], const uint32_t (&)[4], uint64_t, T) {}
#endif

/// sum (64 x n) += a (64 x 16) * b (16 x n); `b`: the descriptor of its rows, which are columns of the product.
QLOAD_PRODUCTS(32, 16, QLOAD_16_NAMES, "{%16, %17, %18, %19}, %20", QLOAD_16_SUMS(0))
QLOAD_PRODUCTS(64, 32, QLOAD_32_NAMES, "{%32, %33, %34, %35}, %36", QLOAD_32_SUMS(0))
QLOAD_PRODUCTS(96, 48, QLOAD_48_NAMES, "{%48, %49, %50, %51}, %52", QLOAD_32_SUMS(0), QLOAD_16_SUMS(32))
QLOAD_PRODUCTS(128, 64, QLOAD_64_NAMES, "{%64, %65, %66, %67}, %68", QLOAD_32_SUMS(0), QLOAD_32_SUMS(32))
QLOAD_PRODUCTS(160, 80, QLOAD_80_NAMES, "{%80, %81, %82, %83}, %84", QLOAD_32_SUMS(0), QLOAD_32_SUMS(32),
               QLOAD_16_SUMS(64))
QLOAD_PRODUCTS(192, 96, QLOAD_96_NAMES, "{%96, %97, %98, %99}, %100", QLOAD_32_SUMS(0), QLOAD_32_SUMS(32),
               QLOAD_32_SUMS(64))
QLOAD_PRODUCTS(224, 112, QLOAD_112_NAMES, "{%112, %113, %114, %115}, %116", QLOAD_32_SUMS(0), QLOAD_32_SUMS(32),
               QLOAD_32_SUMS(64), QLOAD_16_SUMS(96))
QLOAD_PRODUCTS(256, 128, QLOAD_128_NAMES, "{%128, %129, %130, %131}, %132", QLOAD_32_SUMS(0), QLOAD_32_SUMS(32),
               QLOAD_32_SUMS(64), QLOAD_32_SUMS(96))

/// 8-bit codes: sum (64 x n) += a (64 x 32) * b (32 x n); for e4m3, `first` overwrites sum instead.
#if QLOAD_WGMMA
#define QLOAD_OF_BYTES(shape, names, operand, added, scales, ...)                                           \
  asm volatile("wgmma.mma_async.sync.aligned." shape " {" names "}, " operand ", " added scales ";"         \
               : __VA_ARGS__                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define QLOAD_BYTES(n, values, names, operand, all)                                                         \
  template <bool first>                                                                                     \
  __device__ __forceinline__ void multiply_e4m3_async(float(&sum)[values], const uint32_t(&a)[4], uint64_t b) { \
    if constexpr (first)                                                                                    \
      QLOAD_OF_BYTES("m64n" #n "k32.f32.e4m3.e4m3", names, operand, "0", ", 1, 1", all("=f"));              \
    else                                                                                                    \
      QLOAD_OF_BYTES("m64n" #n "k32.f32.e4m3.e4m3", names, operand, "1", ", 1, 1", all("+f"));              \
  }                                                                                                         \
  __device__ __forceinline__ void multiply_int8_async(int(&sum)[values], const uint32_t(&a)[4], uint64_t b) { \
    QLOAD_OF_BYTES("m64n" #n "k32.s32.s8.s8", names, operand, "1", "", all("+r"));                          \
  }
#else
#define QLOAD_BYTES(n, values, names, operand, all)                                                         \
  template <bool first>                                                                                     \
  __device__ __forceinline__ void multiply_e4m3_async(float (&)[values], const uint32_t (&)[4], uint64_t) {}  \
  __device__ __forceinline__ void multiply_int8_async(int (&)[values], const uint32_t (&)[4], uint64_t) {}
#endif
#define QLOAD_ALL_16(kind) QLOAD_16(kind, 0)
#define QLOAD_ALL_32(kind) QLOAD_32(kind, 0)
#define QLOAD_ALL_48(kind) QLOAD_32(kind, 0), QLOAD_16(kind, 32)
#define QLOAD_ALL_64(kind) QLOAD_64(kind, 0)
#define QLOAD_ALL_96(kind) QLOAD_64(kind, 0), QLOAD_32(kind, 64)
#define QLOAD_ALL_128(kind) QLOAD_64(kind, 0), QLOAD_64(kind, 64)
QLOAD_BYTES(32, 16, QLOAD_16_NAMES, "{%16, %17, %18, %19}, %20", QLOAD_ALL_16)
QLOAD_BYTES(64, 32, QLOAD_32_NAMES, "{%32, %33, %34, %35}, %36", QLOAD_ALL_32)
QLOAD_BYTES(96, 48, QLOAD_48_NAMES, "{%48, %49, %50, %51}, %52", QLOAD_ALL_48)
QLOAD_BYTES(128, 64, QLOAD_64_NAMES, "{%64, %65, %66, %67}, %68", QLOAD_ALL_64)
QLOAD_BYTES(192, 96, QLOAD_96_NAMES, "{%96, %97, %98, %99}, %100", QLOAD_ALL_96)
QLOAD_BYTES(256, 128, QLOAD_128_NAMES, "{%128, %129, %130, %131}, %132", QLOAD_ALL_128)

#undef QLOAD_ALL_128
#undef QLOAD_ALL_96
#undef QLOAD_ALL_64
#undef QLOAD_ALL_48
#undef QLOAD_ALL_32
#undef QLOAD_ALL_16
#undef QLOAD_BYTES
#undef QLOAD_OF_BYTES
#undef QLOAD_PRODUCTS
#undef QLOAD_PRODUCT
#undef QLOAD_128_NAMES
#undef QLOAD_112_NAMES
#undef QLOAD_96_NAMES
#undef QLOAD_80_NAMES
#undef QLOAD_64_NAMES
#undef QLOAD_48_NAMES
#undef QLOAD_32_NAMES
#undef QLOAD_16_NAMES
#undef QLOAD_32_SUMS
#undef QLOAD_16_SUMS
#undef QLOAD_64
#undef QLOAD_32
#undef QLOAD_16
#undef QLOAD_8

}  // namespace qload::cuda
