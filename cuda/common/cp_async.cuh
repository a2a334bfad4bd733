// Asynchronous copies of a thread from global to shared memory (cp.async), from Ampere on.
#pragma once

#include <cstdint>

#include "common/fragment.cuh"

namespace jaxllm {

// Starts a copy of 16 bytes, 16-byte aligned. Where it is not `valid`, zeros are written and
// `source` is not read.
__device__ __forceinline__ void cp_async_16(void* target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(target)),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void cp_async_4(void* target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(target)),
               "l"(source), "r"(valid ? 4 : 0)
               : "memory");
}

// The same without a condition.
__device__ __forceinline__ void cp_async_16(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(target)), "l"(source)
               : "memory");
}
__device__ __forceinline__ void cp_async_4(void* target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(target)), "l"(source)
               : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending groups of this thread are in flight. Other threads see the copies
// after the next barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for every copy of this thread, those of an open group included.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace jaxllm
