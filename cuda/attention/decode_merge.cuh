// How the parts of a softmax that warps, blocks and clusters have of one query's keys become one.
//
// A part is the largest score (of base 2), the sum of the weights beside it, and the sum of the
// values with these weights. Warps go together in shared memory. Then each block of a cluster sends
// every other one its share of the columns, to add up and write.
//
// What follows the last key counts in full, since memory has nothing to do meanwhile. So it has one
// barrier, and no fence: see common/cluster.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cluster.cuh"
#include "common/fast_math.cuh"
#include "common/float_order.cuh"
#include "common/reduce_max.cuh"
#include "common/unit.cuh"
#include "common/vector.cuh"

namespace jaxllm {

inline constexpr int kHeads = 8;  // query heads that a warp serves with one read of their keys
inline constexpr int kMostWarps = 16;
// A cluster of 16 is larger than some of the GPU's groups of multiprocessors: the last would wait.
inline constexpr int kMaxCluster = 8;

// The weight of a part of the softmax in the whole; a part without keys has none.
__device__ __forceinline__ float weight_of_part(float largest, float largest_of_all) {
  return largest == -INFINITY ? 0.0f : exp2_fast(largest - largest_of_all);
}

// A cluster of CTAs that send each other numbers, or one CTA by itself. The launcher chooses the
// size `blocks`, a power of two, and tells the kernel: it is 1 in an image below sm_90, which has
// no instructions for clusters.
class BlockCluster {
 public:
  __device__ __forceinline__ static int rank(int blocks) { return blockIdx.x & (blocks - 1); }

  // All threads call this before they send. So many bytes will be sent to this block.
  __device__ __forceinline__ void open(int blocks, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      all_here_.init(1);
      all_here_.arrive_and_expect(bytes);
      hopper::fence_barrier_init();
    }
    hopper::cluster_arrive_relaxed();
    hopper::cluster_wait();
#endif
  }

  // Puts a number, two or four where `target` is, in shared memory, but in the block `rank`.
  template <typename To, class Numbers>
  __device__ __forceinline__ void send(int blocks, int rank, To* target, const Numbers& numbers) {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      hopper::store_remote(rank, target, numbers, all_here_);
      return;
    }
#endif
    *reinterpret_cast<Numbers*>(target) = numbers;
  }

  // Until all that this block is sent has arrived. It may end then: nobody uses its memory. The
  // wait is that for a copy which the engine brings to a whole cluster; one of the cluster's scope
  // would empty the L1 cache besides.
  __device__ __forceinline__ void wait_for_all(int blocks) {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      all_here_.wait(0);
      return;
    }
#endif
    __syncthreads();
  }

 private:
  hopper::Barrier all_here_;
};

// Where the results of a cluster go: to `out`, or, where other clusters have keys of the same
// queries, to their part of `partial`: sums, and then two statistics a row.
template <typename T>
struct MergeTarget {
  T* out;
  float* partial;
  int parts, blocks;  // clusters, and blocks of each
  uint32_t first_row, rows;

  __device__ __forceinline__ void write(int head, int column, int width, float sum, float largest,
                                        float total) const {
    const uint32_t row = first_row + head;
    if (parts == 1) {
      // Without the cases that a division of any two numbers has.
      const float quotient = total == 0.0f ? 0.0f : __fdividef(sum, total);
      out[uint64_t{row} * width + column] = from_float<T>(quotient);
      return;
    }
    const int part = blockIdx.x / blocks;
    const int64_t place = int64_t{part} * rows + row;
    partial[place * width + column] = sum;
    if (column == 0) {
      float* statistics = partial + int64_t{parts} * rows * width + place * 2;
      statistics[0] = largest;
      statistics[1] = total;
    }
  }
};

// The columns that a block of a cluster adds up, but for the last, which may have fewer.
constexpr int share_of_block(int width, int blocks) { return (width + blocks - 1) / blocks; }

// Adds up what warps and blocks have. kWidth is the heads' width where it is a power of two that
// clusters divide into packs of four, and 0 for any other.
template <int kWarps, int kWidth>
class Merge {
  static constexpr int kPack = kWidth ? 4 : 1;
  // A thread adds up what kWarpsEach warps have of a column; a block sends kSent such sums of it.
  static constexpr int kWarpsEach = 4, kSent = kWarps / kWarpsEach;

 public:
  // The shared memory that it takes, of which the constructor is told.
  static constexpr size_t bytes(int blocks, int heads, int width) {
    const int share = share_of_block(width, blocks);
    return (sizeof(Shared) + blocks * stride(heads * share) * sizeof(float) + 127) / 128 * 128;
  }

  // All threads call this. Each of a cluster's `blocks` has `heads`, `width` wide, and adds up
  // `share` of the columns.
  __device__ __forceinline__ Merge(char* memory, int blocks, int heads, int width, int share)
      : shared_(*reinterpret_cast<Shared*>(memory)),
        blocks_(blocks),
        rank_(BlockCluster::rank(blocks)),
        heads_(heads),
        width_(kWidth ? kWidth : width),
        share_(share) {
    const int columns = max(0, min(share_, width_ - rank_ * share_));
    shared_.cluster.open(blocks_, blocks_ * heads * (2 + kSent * columns) * sizeof(float));
  }

  // Takes the statistics that the warp has of a head.
  __device__ __forceinline__ void take_statistics(int head, float largest, float total) {
    shared_.of_warps[head][threadIdx.x / 32] = {largest, total};
  }

  // Where a warp leaves its sum of a column, or a pack from it on. Lanes write packs of four pairs
  // of heads at a time, which then are in different banks.
  __device__ __forceinline__ int place_of(int head, int column) const {
    if constexpr (kWidth == 0) return head * width_ + column;
    return head * kWidth + (column / 4 ^ (head / 2 % 2 | head / 4 % 2 * 4)) * 4 + column % 4;
  }

  // Adds up all and writes the block's share of the columns. All threads call this. The warps have
  // left their sums in `of_warps`, `warp_bytes` from one warp to the next.
  template <typename T>
  __device__ __forceinline__ void finish(const char* of_warps, int warp_bytes,
                                         const MergeTarget<T>& target) {
    __syncthreads();
    send_parts(of_warps, warp_bytes);
    shared_.cluster.wait_for_all(blocks_);
    add_up_received(target);
  }

 private:
  struct Shared {
    float2 of_warps[kHeads][kWarps];       // the largest score and the total of its warps
    float2 received[kHeads][kMaxCluster];  // the same of the cluster's blocks
    BlockCluster cluster;
    alignas(16) float received_sums[4];  // [blocks][kSent][heads][share]
  };

  // Floats from what one block sends to what the next does: the kMaxCluster blocks' sums of
  // neighbouring columns lie in different banks.
  __host__ __device__ static constexpr int stride(int count) {
    return (kSent * count + 31) / 32 * 32 + 32 / kMaxCluster;
  }

  __device__ __forceinline__ int divided_by_share(int i) const {
    if constexpr (kWidth > 0) {
      return static_cast<uint32_t>(i * blocks_) / kWidth;
    } else {
      return i / share_;
    }
  }

  // Sends the statistics of the block to each block, and each the sums of its columns, times their
  // weight in this block. A warp has a head and kWarpsEach warps' sums at a time.
  __device__ __forceinline__ void send_parts(const char* of_warps, int warp_bytes) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < heads_ * kSent; item += kWarps) {
      const int head = item / kSent, sent = item % kSent;
      const float2 of_warp = shared_.of_warps[head][lane % kWarps];
      const float largest = from_ordered(__reduce_max_sync(kFullWarp, to_ordered(of_warp.x)));
      const float weight = weight_of_part(of_warp.x, largest);
      float total[1] = {weight * of_warp.y};
      sum_over_lanes<kWarps>(total);  // by all warps, beside the sums
      const char* const summands = of_warps + sent * kWarpsEach * warp_bytes;
      float* const received =
          shared_.received_sums + rank_ * stride(heads_ * share_) + (sent * heads_ + head) * share_;
      // All lanes stay: each has weights that the others ask for.
      for (int first = 0; first < width_; first += 32 * kPack) {
        const int column = min(first + lane * kPack, width_ - kPack);
        const char* summand = summands + place_of(head, column) * sizeof(float);
        Unit<float, kPack> packs[kWarpsEach];
#pragma unroll
        for (int w = 0; w < kWarpsEach; ++w) {
          packs[w] = *reinterpret_cast<const Unit<float, kPack>*>(summand + w * warp_bytes);
        }
        float sum[kPack] = {};
#pragma unroll
        for (int w = 0; w < kWarpsEach; ++w) {
          const float of_pack = __shfl_sync(kFullWarp, weight, sent * kWarpsEach + w);
#pragma unroll
          for (int j = 0; j < kPack; ++j) sum[j] += of_pack * packs[w][j];
        }
        if (first + lane * kPack >= width_) continue;
        const int to = divided_by_share(column);
        shared_.cluster.send(blocks_, to, received + column - to * share_,
                             Unit<float, kPack>::of(sum));
      }
      if (sent == 0 && lane < blocks_) {
        shared_.cluster.send(blocks_, lane, &shared_.received[head][rank_],
                             float2{largest, total[0]});
      }
    }
  }

  // Adds up what the blocks have sent, and writes it: eight neighbouring lanes a column of a head,
  // what one block sent each.
  template <typename T>
  __device__ __forceinline__ void add_up_received(const MergeTarget<T>& target) {
    const int block = threadIdx.x % kMaxCluster, count = heads_ * share_;
    constexpr int kColumns = 32 / kMaxCluster;
    for (int first = threadIdx.x / 32 * kColumns; first < count; first += kWarps * kColumns) {
      const int i = min(first + static_cast<int>(threadIdx.x % 32) / kMaxCluster, count - 1);
      const int head = divided_by_share(i), column = rank_ * share_ + i - head * share_;
      float2 statistics = {-INFINITY, 0.0f};
      float totals[2] = {};  // of the sums, and of the weights
      if (block < blocks_) {
        statistics = shared_.received[head][block];
        const float* sums = shared_.received_sums + block * stride(count) + i;
#pragma unroll
        for (int k = 0; k < kSent; ++k) totals[0] += sums[k * count];
      }
      const float largest = max_over_lanes<kMaxCluster>(statistics.x);
      const float weight = weight_of_part(statistics.x, largest);
      totals[0] *= weight;
      totals[1] = weight * statistics.y;
      sum_over_lanes<kMaxCluster>(totals);
      if (block == 0 && column < width_) {
        target.write(head, column, width_, totals[0], largest, totals[1]);
      }
    }
  }

  Shared& shared_;
  int blocks_, rank_, heads_, width_;
  int share_;  // columns of a block, but for the last, which may have fewer
};

}  // namespace jaxllm
