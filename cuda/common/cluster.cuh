// Thread block clusters: CTAs that run at the same time and reach each other's shared memory.
#pragma once

#include <cstdint>

#include "common/barrier.cuh"
#include "common/vector.cuh"

namespace jaxllm::hopper {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all the cluster's threads, in two halves. The relaxed arrival says that the CTA is
// there, and with fence_barrier_init that its barriers are. The release also publishes what it has
// stored.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in CTA `rank` of what this CTA has at `pointer`.
__device__ __forceinline__ uint32_t remote_address(int rank, const void* pointer) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(smem_address(pointer)), "r"(rank));
  return address;
}

// Stores one, two or four floats where `target` is, but in CTA `rank`, whose `barrier` counts their
// bytes. The receiver waits for those bytes alone; a barrier of the cluster would wait for all
// stores. Only a launch with clusters may do this.
__device__ __forceinline__ void store_remote(int rank, void* target, const Pack<float, 1>& element,
                                             const Barrier& barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          remote_address(rank, target)),
      "f"(element.value), "r"(remote_address(rank, &barrier))
      : "memory");
}

__device__ __forceinline__ void store_remote(int rank, void* target, const float2& pair,
                                             const Barrier& barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(remote_address(rank, target)),
      "f"(pair.x), "f"(pair.y), "r"(remote_address(rank, &barrier))
      : "memory");
}

__device__ __forceinline__ void store_remote(int rank, void* target, const Pack<float>& pack,
                                             const Barrier& barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote_address(rank, target)),
      "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]), "r"(pack.words[3]),
      "r"(remote_address(rank, &barrier))
      : "memory");
}

}  // namespace jaxllm::hopper
