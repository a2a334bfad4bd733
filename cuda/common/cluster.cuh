// Clusters: blocks that run at the same time and reach each other's shared memory.
#pragma once

#include <cstdint>

#include "common/hopper.cuh"
#include "common/unit.cuh"

namespace jaxllm::hopper {

__device__ __forceinline__ int rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The halves of a barrier of all the cluster's threads, which says that they are there, and with
// fence_barrier_init that their barriers are; not that others see what they have stored.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in block `rank`, of what this block has at `pointer`.
__device__ __forceinline__ uint32_t address_in_block(int rank, const void* pointer) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// Puts one number, two or four where `target` is, but in block `rank`, and there they count at
// `barrier` as bytes that have come. So nobody need fence what was sent, as before a barrier of the
// cluster, and wait for all of memory. A launch without clusters may not do this.
__device__ __forceinline__ void send(int rank, void* target, const Element<float>& number,
                                     const Barrier& barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address_in_block(rank, target)),
      "f"(number.value), "r"(address_in_block(rank, &barrier))
      : "memory");
}

__device__ __forceinline__ void send(int rank, void* target, const float2& pair,
                                     const Barrier& barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(address_in_block(rank, target)),
      "f"(pair.x), "f"(pair.y), "r"(address_in_block(rank, &barrier))
      : "memory");
}

__device__ __forceinline__ void send(int rank, void* target, const Pack<float>& pack,
                                     const Barrier& barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address_in_block(rank, target)),
      "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]), "r"(pack.words[3]),
      "r"(address_in_block(rank, &barrier))
      : "memory");
}

}  // namespace jaxllm::hopper
