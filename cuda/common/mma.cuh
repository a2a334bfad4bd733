// Matrix products of a warp on tensor cores, for Ampere and later: mma.sync of 16 x 8 results over
// 16 products each, what loads its operands from shared memory, and asynchronous copies.
//
// A lane holds of each 8 x 8 part two neighbouring elements, row lane / 4, columns 2 * (lane % 4)
// and the next. `a` is 16 x 16 in four such parts (top left, bottom left, top right, bottom right),
// `b` 16 x 8 in two, transposed, and the float results 16 x 8: c[0], c[1] above, c[2], c[3] below.
// So two neighbouring results, rounded, are an `a` operand as they stand.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxllm {

template <typename T>
__device__ __forceinline__ uint32_t shared_address(const T* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8 x 8 parts; lane i gives the address of row i % 8 of part i / 8, 16 bytes aligned.
template <typename T>
__device__ __forceinline__ void load_matrices(uint32_t (&parts)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each part transposed.
template <typename T>
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&parts)[4], const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a * b, of bfloat16 or float16 operands.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// c += a * b of TF32 numbers, 16 x 8 results over 8 products each: a word has one number.
__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a * b of int8, 16 x 8 results over 32 products each: a word has four numbers of a row of
// `a`, or of a column of `b`, where the 16-bit operands have two.
__device__ __forceinline__ void multiply_add_int8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to T, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Starts a copy of 16 bytes, 16-byte aligned, to shared memory; zeros are written instead, and
// `source` is not read, where it is not `valid`.
__device__ __forceinline__ void copy_16_async(void* target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_4_async(void* target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(valid ? 4 : 0)
               : "memory");
}

// The same without a condition.
__device__ __forceinline__ void copy_16_async(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)),
               "l"(source)
               : "memory");
}
__device__ __forceinline__ void copy_4_async(void* target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source)
               : "memory");
}

// Closes a group of this thread's copies, and waits for all groups but the last kPending.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_for_older_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for every copy that this thread has started; others see them after the next barrier.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace jaxllm
