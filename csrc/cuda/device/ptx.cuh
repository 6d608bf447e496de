// Wrappers of single instructions: loads with cache hints, matrix products, asynchronous copies, dependencies of kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qload::cuda {

/// Load 16 bytes that nobody reads again: bypass the L1. Loads stay in program order.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

/// Prefetch into the L2.
__device__ __forceinline__ void fetch_near(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/// Prefetch into the L1.
__device__ __forceinline__ void fetch_nearest(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

/// Hide the origin of a pointer from the compiler. Otherwise it adds several registers for every address.
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

/// Hide the origin of a number from the compiler.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

/// (word & mask) | bits in one instruction if `bits` is in a register; two immediates take two instructions.
template <uint32_t mask>
__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t bits) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(made) : "r"(word), "n"(mask), "r"(bits));
  return made;
}

__device__ __forceinline__ void add(float4& sum, float4 other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

__device__ __forceinline__ void scale(float4& sum, float factor) {
  sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ uint32_t shared_address(uint32_t address) { return address; }

/// Load from a `shared_address` in a register. For pointers the compiler recomputes the address in every iteration.
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

/// The same for 8 bytes.
__device__ __forceinline__ uint2 load_shared_pair(uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
  return value;
}

/// The same for 16 bytes.
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

/// Copy 16 bytes from global to shared memory through the L1, for reuse by other warps.
__device__ __forceinline__ void copy_async_near(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/// Copy 16 bytes from global to shared memory, or store zeros.
template <class To>  // a pointer or a `shared_address`
__device__ __forceinline__ void copy_async(To to, const void* from, bool zeros) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(zeros ? 0 : 16)
               : "memory");
}

/// Copy 4 bytes from global to shared memory.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/// Close a group of copies; wait for all groups but the `left` latest, at most 3.
__device__ __forceinline__ void group_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copy_groups(int left) {
  switch (left) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Load four 8 x 8 matrices of 16-bit elements; lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

#define QLOAD_SHAPE(type) "mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "
#define QLOAD_MULTIPLY(T, type)                                                                                       \
  __device__ __forceinline__ void multiply(float(&sum)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, T) {       \
    asm(QLOAD_SHAPE(type) "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                           \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                              \
  }                                                                                                                   \
  __device__ __forceinline__ void multiply_first(float(&sum)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, T) { \
    asm(QLOAD_SHAPE(type) "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"                       \
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));                                   \
  }

/// sum += a (16 x 16) * b (16 x 8), or sum = a * b.
QLOAD_MULTIPLY(__half, "f16")
QLOAD_MULTIPLY(__nv_bfloat16, "bf16")

#undef QLOAD_MULTIPLY
#undef QLOAD_SHAPE

/// Elect one thread of a warp, known to the compiler as a single one. All threads of the warp call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred is;\nelect.sync _|is, 0xffffffff;\nselp.u32 %0, 1, 0, is;\n}" : "=r"(chosen));
#endif
  return chosen;
}

/// Allow the next kernel to start. It waits before it reads results of this one.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Wait for the results of earlier kernels.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace qload::cuda
