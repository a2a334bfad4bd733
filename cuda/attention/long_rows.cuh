// How a block works on a row that its threads do not hold in registers: in parts, one pack of each
// array for each thread, in as many passes over the row as the kernel makes.
//
// A source of packs has `begin`, before the first pass, and `pass`, which calls work(part, packs)
// for the parts from the column `first` up to `end`. The numbers of threads and blocks were found
// by measurement on an H200.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/rows.cuh"
#include "common/launch.h"
#include "common/vector.cuh"

namespace jaxllm::attention {

// Every pass reads the row again, in the L2 cache as a rule, and one part ahead.
struct ReadAgain {
  static constexpr int kThreads = 1024;
  static constexpr int kMinBlocks = 2;  // on a multiprocessor: bounds the registers

  template <typename T, int kArrays>
  __device__ __forceinline__ void begin(const Block&, const Row<T>&, const T* const (&)[kArrays],
                                        int) const {}

  template <bool kLast, typename T, int kArrays, class Work>
  __device__ __forceinline__ void pass(const Block& team, const Row<T>& row,
                                       const T* const (&sources)[kArrays], int first, int end,
                                       Work work) const {
    const int stride = blockDim.x * kPackSize<T>;
    Pack<T> next[kArrays][1];
    const auto fetch = [&](int start) {
      const RowPart<T> part(team, row, start);
#pragma unroll
      for (int a = 0; a < kArrays; ++a) part.template load<!kLast>(next[a], sources[a]);
    };
    fetch(first);
    for (int start = first; start < end; start += stride) {
      Pack<T> packs[kArrays][1];
#pragma unroll
      for (int a = 0; a < kArrays; ++a) packs[a][0] = next[a][0];
      fetch(start + stride);
      work(RowPart<T>(team, row, start), packs);
    }
  }
};

// The row is copied to shared memory before the first pass, all of it at once. A thread copies what
// it will read itself, so nobody waits at a barrier.
struct HoldInSharedMemory {
  static constexpr int kThreads = 512;
  static constexpr int kMinBlocks = 2;

  static int64_t bytes(int64_t packs, int arrays) {
    return divide_up(packs, kThreads) * kThreads * arrays * 16;
  }

  template <typename T, int kArrays>
  __device__ __forceinline__ void begin(const Block& team, const Row<T>& row,
                                        const T* const (&sources)[kArrays], int first) const {
    const int stride = blockDim.x * kPackSize<T>;
    Pack<T>* slot = slots<T>();
    for (int start = first; start < row.seen; start += stride) {
      const RowPart<T> part(team, row, start);
#pragma unroll
      for (int a = 0; a < kArrays; ++a, slot += blockDim.x) part.copy(slot, sources[a]);
    }
    wait_for_copies();
  }

  template <bool kLast, typename T, int kArrays, class Work>
  __device__ __forceinline__ void pass(const Block& team, const Row<T>& row,
                                       const T* const (&)[kArrays], int first, int end,
                                       Work work) const {
    const int stride = blockDim.x * kPackSize<T>;
    const Pack<T>* slot = slots<T>();
    for (int start = first; start < end; start += stride) {
      const RowPart<T> part(team, row, start);
      Pack<T> packs[kArrays][1];
#pragma unroll
      for (int a = 0; a < kArrays; ++a, slot += blockDim.x) {
        if (part.sees(0)) packs[a][0] = *slot;
      }
      work(part, packs);
    }
  }

  template <typename T>
  __device__ __forceinline__ static Pack<T>* slots() {
    extern __shared__ int4 shared_memory[];
    return reinterpret_cast<Pack<T>*>(shared_memory) + threadIdx.x;
  }
};

}  // namespace jaxllm::attention
