// How the parts of a softmax that warps, blocks and clusters have of one query's keys become one.
//
// A part is the largest score (of base 2), the sum of the weights beside it, and the sum of the
// values with these weights. Warps go together in shared memory. Then each block of a cluster sends
// every other one its share of the columns, to add up and write.
#pragma once

#include <cooperative_groups.h>

#include <cstddef>
#include <cstdint>

#include "common/fast_math.cuh"
#include "common/unit.cuh"
#include "common/vector.cuh"

namespace jaxllm {

inline constexpr int kHeads = 8;  // query heads that a warp serves with one read of their keys
inline constexpr int kMostWarps = 16;
// A cluster of 16 is larger than some of the GPU's groups of multiprocessors: the last would wait.
inline constexpr int kMaxCluster = 8;

// A number of each of kCount parts; rows of so many bytes that lie side by side in different banks.
template <int kCount>
struct alignas(16) PartsRow {
  float values[kCount + 4];

  __device__ __forceinline__ float& operator[](int i) { return values[i]; }
  __device__ __forceinline__ const float& operator[](int i) const { return values[i]; }

  // The first kFound of them.
  template <int kFound>
  __device__ __forceinline__ void read(float (&found)[kFound]) const {
#pragma unroll
    for (int i = 0; i < kFound; i += 4) {
      const Pack<float> four = load<4>(values + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) found[i + j] = four[j];
    }
  }
};

struct MergeMemory {
  PartsRow<kMostWarps> largest[kHeads], total[kHeads];
  PartsRow<kMaxCluster> received_largest[kHeads], received_total[kHeads];
  float received[4];  // [blocks][kHeads][share of the columns]; then a piece of memory a warp
};

// The bytes of a block's shared memory before the warps' pieces.
__host__ __device__ constexpr size_t merge_bytes(int width) {
  return (sizeof(MergeMemory) + sizeof(float) * kHeads * (width + kMaxCluster) + 127) / 128 * 128;
}

// The weight of a part of the softmax in the whole; a part without keys has none.
__device__ __forceinline__ float weight_of_part(float largest, float largest_of_all) {
  return largest == -INFINITY ? 0.0f : exp2_fast(largest - largest_of_all);
}

// A cluster of blocks, or one block by itself where there are no clusters.
struct BlockCluster {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::cluster_group group = cooperative_groups::this_cluster();
  __device__ int blocks() const { return group.num_blocks(); }
  __device__ int rank() const { return group.block_rank(); }
  __device__ void arrive() const { group.barrier_arrive(); }
  __device__ void wait() const { group.barrier_wait(); }
  __device__ MergeMemory* memory_of(MergeMemory& mine, int rank) const {
    return group.map_shared_rank(&mine, rank);
  }
#else
  __device__ int blocks() const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ void arrive() const {}
  __device__ void wait() const { __syncthreads(); }
  __device__ MergeMemory* memory_of(MergeMemory& mine, int) const { return &mine; }
#endif
};

// The weight of a warp's part in its block's, when all warps have said their largest scores.
template <int kWarps>
__device__ __forceinline__ float weight_in_block(const MergeMemory& shared, int head, int warp) {
  float of_warps[kWarps], largest = -INFINITY;
  shared.largest[head].read(of_warps);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, of_warps[w]);
  return weight_of_part(shared.largest[head][warp], largest);
}

// Where pack `column / 4` of a head's sums lies, in packs of four from the head's first: lanes
// write packs of four pairs of heads at a time, which then are in different banks.
__device__ __forceinline__ int pack_of_sums(int head, int column) {
  return column / 4 ^ (head / 2 % 2 | head / 4 % 2 * 4);
}

// Where the results of a cluster go: to `out`, or, where other clusters have keys of the same
// queries, to their part of `partial`: sums, and then two statistics a row.
template <typename T>
struct MergeTarget {
  T* out;
  float* partial;
  int parts, part;
  int64_t first_row, rows;

  __device__ __forceinline__ void write(int head, int column, int width, float sum, float largest,
                                        float total) const {
    const int64_t row = first_row + head;
    if (parts == 1) {
      out[row * width + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
      return;
    }
    partial[(part * rows + row) * width + column] = sum;
    if (column == 0) {
      float* statistics = partial + parts * rows * width + (part * rows + row) * 2;
      statistics[0] = largest;
      statistics[1] = total;
    }
  }
};

// Adds up what warps and blocks have, and writes it. Each warp has left its totals and,
// `warp_bytes` from one warp to the next, its sums as [heads][width], both times its weight in the
// block. The cluster's blocks have arrived once, to say that they run. kWidth is the heads' width,
// a power of two that clusters divide into packs of four, with the packs in the order of
// pack_of_sums; or 0 for any other width, which then is `any_width`.
template <int kWarps, int kWidth, typename T>
__device__ void merge_parts(MergeMemory& shared, const char* of_warps, size_t warp_bytes,
                            const BlockCluster& cluster, const MergeTarget<T>& target, int heads,
                            int any_width) {
  constexpr int kThreads = 32 * kWarps, kPack = kWidth ? 4 : 1;
  const int width = kWidth ? kWidth : any_width, thread = threadIdx.x;
  const int blocks = cluster.blocks(), rank = cluster.rank(), log2_blocks = 31 - __clz(blocks);
  const int share = (width + blocks - 1) >> log2_blocks, log2_share = 31 - __clz(share);
  const auto divided_by_share = [&](int i) { return kWidth ? i >> log2_share : i / share; };
  __syncthreads();
  cluster.wait();
  for (int i = thread; i < blocks * kHeads; i += kThreads) {
    const int head = i % kHeads;
    float largest = -INFINITY, total = 0.0f, of_warps[kWarps];
    shared.largest[head].read(of_warps);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, of_warps[w]);
    shared.total[head].read(of_warps);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of_warps[w];
    MergeMemory& other = *cluster.memory_of(shared, i / kHeads);
    other.received_largest[head][rank] = largest;
    other.received_total[head][rank] = total;
  }
  for (int i = thread * kPack; i < heads * width; i += kThreads * kPack) {
    const int head = i / width, column = i % width, to = divided_by_share(column);
    const int place = kWidth ? head * width + pack_of_sums(head, column) * 4 : i;
    float sum[kPack] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto* sums = reinterpret_cast<const float*>(of_warps + w * warp_bytes);
      const auto of_warp = *reinterpret_cast<const Unit<float, kPack>*>(sums + place);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] += of_warp[j];
    }
    float* received = cluster.memory_of(shared, to)->received;
    received += (rank * kHeads + head) * share + column - to * share;
    *reinterpret_cast<Unit<float, kPack>*>(received) = Unit<float, kPack>::of(sum);
  }
  cluster.arrive();
  cluster.wait();
  for (int i = thread; i < heads * share; i += kThreads) {
    const int head = divided_by_share(i), column = rank * share + i - head * share;
    if (column >= width) continue;
    float of_blocks[kMaxCluster], totals[kMaxCluster];
    shared.received_largest[head].read(of_blocks);
    shared.received_total[head].read(totals);
    float largest = -INFINITY, total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kMaxCluster; ++k) {
      if (k < blocks) largest = fmaxf(largest, of_blocks[k]);
    }
#pragma unroll
    for (int k = 0; k < kMaxCluster; ++k) {
      if (k >= blocks) continue;
      const float weight = weight_of_part(of_blocks[k], largest);
      total += weight * totals[k];
      sum += weight * shared.received[k * kHeads * share + i];
    }
    target.write(head, column, width, sum, largest, total);
  }
}

}  // namespace jaxllm
