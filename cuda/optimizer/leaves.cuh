// One launch for many arrays, the leaves of a pytree (multi-tensor apply): which leaf a CTA works
// on.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/launch.h"

namespace jaxllm {

// As many leaves as fit a kernel's 4 KB of parameters.
inline constexpr int kMaxLeaves = 64;

// The leaves of a launch and the first CTA of each. The table is a kernel parameter, passed by
// value: it needs no copy to the device and no memory there.
template <class Leaf>
struct LeafTable {
  Leaf leaves[kMaxLeaves];
  uint32_t first_ctas[kMaxLeaves];  // beyond the last leaf: UINT32_MAX

  // The leaf that a CTA works on: a binary search.
  __device__ __forceinline__ int find(uint32_t cta) const {
    int leaf = 0;
#pragma unroll
    for (int step = kMaxLeaves / 2; step > 0; step /= 2) {
      if (first_ctas[leaf + step] <= cta) leaf += step;
    }
    return leaf;
  }
};

// Calls `launch(table, ctas)` for each table that the leaves fill. A leaf has a CTA for every
// `elements` of its elements; leaves of size zero have none.
template <class Leaf, class Launch>
cudaError_t launch_tables(const std::vector<Leaf>& leaves, int64_t elements, Launch launch) {
  LeafTable<Leaf> table;
  int count = 0;
  int64_t ctas = 0;
  const auto flush = [&] {
    if (count == 0) return cudaSuccess;
    std::fill(table.first_ctas + count, table.first_ctas + kMaxLeaves, UINT32_MAX);
    const cudaError_t status = launch(table, ctas);
    count = ctas = 0;
    return status;
  };
  for (const Leaf& leaf : leaves) {
    if (leaf.size == 0) continue;
    table.leaves[count] = leaf;
    table.first_ctas[count] = static_cast<uint32_t>(ctas);
    ctas += divide_up(leaf.size, elements);
    if (++count == kMaxLeaves) JAXLLM_RETURN_IF_ERROR(flush());
  }
  return flush();
}

}  // namespace jaxllm
