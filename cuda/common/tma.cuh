// Hopper's Tensor Memory Accelerator (TMA), one thin function an instruction. One thread issues a
// copy, and the hardware does it.
//
// Two kinds of access meet in shared memory. Threads load and store through the generic proxy; TMA
// and wgmma go through the async proxy, which does not see what a thread has stored until that
// thread fences (fence_async_proxy) and then meets the user at a barrier.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/barrier.cuh"

namespace jaxllm::hopper {

// ---- Fences between the proxies.

// What this thread stored to shared memory is seen by later products and copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory, in both directions.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- Loads and stores of boxes and of consecutive bytes.

// Coordinates of a box: column, head, token, sequence (see common/tensor_map.h).
struct Box {
  int column, head, token, sequence;
};

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box into shared memory; its bytes arrive at the barrier.
__device__ __forceinline__ void tma_load_4d(void* target, const CUtensorMap& map, const Box& box,
                                            const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(target)),
      "l"(&map), "r"(barrier.address()), "r"(box.column), "r"(box.head), "r"(box.token),
      "r"(box.sequence)
      : "memory");
}

// Copies consecutive bytes, a multiple of 16, into shared memory.
__device__ __forceinline__ void bulk_load(void* target, const void* source, uint32_t bytes,
                                          const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(target)),
      "l"(source), "r"(bytes), "r"(barrier.address())
      : "memory");
}

__device__ __forceinline__ void tma_store_4d(const CUtensorMap& map, const void* source,
                                             const Box& box) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(smem_address(source)), "r"(box.column), "r"(box.head), "r"(box.token), "r"(box.sequence)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(smem_address(source)), "r"(bytes)
               : "memory");
}

// Adds consecutive floats to those in global memory.
__device__ __forceinline__ void bulk_reduce_add(float* target, const float* source,
                                                uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
      "r"(smem_address(source)), "r"(bytes)
      : "memory");
}

// Closes the group of the stores that this thread has issued since the last one.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending groups have not read their source, which may then be overwritten.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending groups are not done.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Boxes of a matrix.

// Loads a box whose first element is at `column` and `row`; its bytes arrive at the barrier.
__device__ __forceinline__ void tma_load_2d(void* target, const CUtensorMap& map, int column,
                                            int row, const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(target)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row)
      : "memory");
}

// The same into every CTA of the cluster whose bit `ctas` has, in each to the same place and with
// the same barrier.
__device__ __forceinline__ void tma_load_2d(void* target, const CUtensorMap& map, int column,
                                            int row, const Barrier& barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(target)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void tma_store_2d(const CUtensorMap& map, const void* source, int column,
                                             int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
      "r"(smem_address(source)), "r"(column), "r"(row)
      : "memory");
}

}  // namespace jaxllm::hopper
