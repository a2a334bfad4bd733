// One launch for many arrays, the leaves of a tree: which leaf a block works on.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/launch.h"

namespace jaxllm {

// As many leaves as fit a kernel's 4 KB of parameters.
inline constexpr int kMaxLeaves = 64;

// The leaves of a launch and the first block of each. It is passed to the kernel by value, so it
// takes no copy to the device and no memory there.
template <class Leaf>
struct LeafTable {
  Leaf leaves[kMaxLeaves];
  uint32_t first_blocks[kMaxLeaves];  // beyond the last leaf: no block reaches it

  // The leaf that a block works on.
  __device__ __forceinline__ int find(uint32_t block) const {
    int leaf = 0;
#pragma unroll
    for (int step = kMaxLeaves / 2; step > 0; step /= 2) {
      if (first_blocks[leaf + step] <= block) leaf += step;
    }
    return leaf;
  }
};

// Calls `launch(table, blocks)` for as many tables as the leaves fill, each leaf with a block for
// every `elements` of its elements; leaves of size zero get none.
template <class Leaf, class Launch>
cudaError_t launch_tables(const std::vector<Leaf>& leaves, int64_t elements, Launch launch) {
  LeafTable<Leaf> table;
  int count = 0;
  int64_t blocks = 0;
  const auto flush = [&] {
    if (count == 0) return cudaSuccess;
    std::fill(table.first_blocks + count, table.first_blocks + kMaxLeaves, UINT32_MAX);
    const cudaError_t status = launch(table, blocks);
    count = blocks = 0;
    return status;
  };
  for (const Leaf& leaf : leaves) {
    if (leaf.size == 0) continue;
    table.leaves[count] = leaf;
    table.first_blocks[count] = static_cast<uint32_t>(blocks);
    blocks += divide_up(leaf.size, elements);
    if (++count == kMaxLeaves) JAXLLM_RETURN_IF_ERROR(flush());
  }
  return flush();
}

}  // namespace jaxllm
