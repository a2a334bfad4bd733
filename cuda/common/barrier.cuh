// Barriers in shared memory (mbarrier) and named barriers of a part of a CTA, for Hopper.
#pragma once

#include <cstdint>

#include "common/fragment.cuh"

namespace jaxllm::hopper {

inline constexpr int kWarpgroup = 128;  // threads

// Completes a phase when `count` arrivals, and the bytes that one of them announced, have come. A
// waiter names the phase by its parity: a fresh barrier is in phase 0, and counts as having
// completed the phase before it, of parity 1.
class Barrier {
 public:
  __device__ __forceinline__ void init(uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives, and makes the phase wait for `bytes` from TMA.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  __device__ __forceinline__ void wait(uint32_t parity) {
    // A loop within the statement: the compiler sees no branch between the products in flight.
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(address()),
        "r"(parity)
        : "memory");
  }

  __device__ __forceinline__ uint32_t address() const { return smem_address(this); }

 private:
  uint64_t state_;
};

// Arrives for a whole warp, by its first lane. To compute-sanitizer's racecheck that is the lane's
// word alone: where threads and TMA take turns to write, each thread arrives for itself.
__device__ __forceinline__ void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// Arrives at the barrier that lies where `barrier` does, in CTA `rank` of the cluster.
__device__ __forceinline__ void arrive_remote(const Barrier& barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier.address()),
      "r"(rank)
      : "memory");
}

// After the barriers' init, before the CTA's threads synchronize: TMA sees them too.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Named barriers of a part of the CTA (0 is __syncthreads'). `threads` counts those that
// wait and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace jaxllm::hopper
