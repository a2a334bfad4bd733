// Split-KV merge: the partial softmaxes of a query's keys become one, at three levels.
//
//   1. the warps of a CTA        SplitKvMerge, in shared memory
//   2. the CTAs of a cluster     SplitKvMerge, in distributed shared memory: each CTA sends each
//                                other one its part of the columns, to add up and write
//   3. the clusters of a query   decode_attention_merge_kernel, through global memory
//
// A part is the largest score (in base 2), the sum of the weights relative to it, and the sum of
// the values with these weights.
//
// The time after the last key counts in full, since memory is idle then. So the first two levels
// have one barrier, and no fence: see common/cluster.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/sinks.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_math.cuh"
#include "common/float_order.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::decode {

inline constexpr int kMaxHeads = 8;  // query heads for which a warp reads their keys once
// A CTA has kMaxWarps where a cluster has all CTAs of a head: half of the SMs then read a long
// sequence as fast as all of them. Other CTAs have kMinWarps.
inline constexpr int kMaxWarps = 16, kMinWarps = 8;
// A cluster of 16 is larger than some of the GPU's GPCs: the last clusters would wait.
inline constexpr int kMaxCluster = 8;

// The weight of a part of the softmax in the whole; a part without keys has none.
__device__ __forceinline__ float weight_of_part(float largest, float largest_of_all) {
  return largest == -INFINITY ? 0.0f : exp2_fast(largest - largest_of_all);
}

using attention::Sinks;

// The denominator of a softmax, relative to its largest score, from that of its keys.
__device__ __forceinline__ float add_sink(float total, float largest, float sink) {
  return largest == -INFINITY ? total : total + exp2_fast(sink - largest);
}

// The CTAs of a cluster that send each other floats, or one CTA by itself. The launcher chooses the
// number `ctas`, a power of two, and tells the kernel: it is 1 in an image below sm_90, which has
// no instructions for clusters.
class ClusterExchange {
 public:
  __device__ __forceinline__ static int rank(int ctas) { return blockIdx.x & (ctas - 1); }

  // All threads call this before they send. This CTA will receive so many bytes.
  __device__ __forceinline__ void init(int ctas, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    if (ctas == 1) return;
    if (threadIdx.x == 0) {
      received_.init(1);
      received_.arrive_and_expect(bytes);
      hopper::fence_barrier_init();
    }
    hopper::cluster_arrive_relaxed();
    hopper::cluster_wait();
#endif
  }

  // Stores one, two or four floats where `target` is, but in CTA `rank`.
  template <typename To, class Floats>
  __device__ __forceinline__ void send(int ctas, int rank, To* target, const Floats& floats) {
#if __CUDA_ARCH__ >= 900
    if (ctas > 1) {
      hopper::store_remote(rank, target, floats, received_);
      return;
    }
#endif
    *reinterpret_cast<Floats*>(target) = floats;
  }

  // Waits until all that this CTA is sent has arrived. The CTA may exit then: no other CTA uses its
  // memory. A wait with the scope of the cluster would also invalidate the L1 cache.
  __device__ __forceinline__ void wait(int ctas) {
#if __CUDA_ARCH__ >= 900
    if (ctas > 1) {
      received_.wait(0);
      return;
    }
#endif
    __syncthreads();
  }

 private:
  hopper::Barrier received_;
};

// Where a cluster writes: to `out`, or, if other clusters have keys of the same queries, to its
// part of `partial`, which has the sums of all parts, then two statistics a row.
template <typename T>
struct MergeOutput {
  T* out;
  float* partial;
  int parts, ctas;  // clusters, and CTAs of each
  uint32_t first_row, rows;

  __device__ __forceinline__ void write(int head, int column, int width, float sum, float largest,
                                        float total, float sink) const {
    const uint32_t row = first_row + head;
    if (parts == 1) {
      // __fdividef leaves out the special cases of a division of any two floats.
      const float denominator = add_sink(total, largest, sink);
      const float quotient = denominator == 0.0f ? 0.0f : __fdividef(sum, denominator);
      out[uint64_t{row} * width + column] = from_float<T>(quotient);
      return;
    }
    const int part = blockIdx.x / ctas;
    const int64_t partial_row = int64_t{part} * rows + row;
    partial[partial_row * width + column] = sum;
    if (column == 0) {
      float* statistics = partial + int64_t{parts} * rows * width + partial_row * 2;
      statistics[0] = largest;
      statistics[1] = total;
    }
  }
};

// The columns that a CTA of a cluster merges; the last CTA may have fewer.
constexpr int columns_of_cta(int width, int ctas) { return (width + ctas - 1) / ctas; }

// The first two levels. kHeadDim is the heads' width where it is a power of two that clusters
// divide into packs of four, and 0 for any other width.
template <int kWarps, int kHeadDim>
class SplitKvMerge {
  static constexpr int kPack = kHeadDim ? 4 : 1;
  // A thread adds up kWarpsEach warps' sums of a column; a CTA sends kSent such sums of it.
  static constexpr int kWarpsEach = 4, kSent = kWarps / kWarpsEach;

 public:
  // The bytes of shared memory at the constructor's `memory`.
  static constexpr size_t bytes(int ctas, int heads, int width) {
    const int columns = columns_of_cta(width, ctas);
    return (sizeof(Shared) + ctas * stride(heads * columns) * sizeof(float) + 127) / 128 * 128;
  }

  // All threads call this. Each of a cluster's `ctas` has `heads`, `width` wide, and merges
  // `cta_columns` of the columns.
  __device__ __forceinline__ SplitKvMerge(char* memory, int ctas, int heads, int width,
                                          int cta_columns)
      : shared_(*reinterpret_cast<Shared*>(memory)),
        ctas_(ctas),
        rank_(ClusterExchange::rank(ctas)),
        heads_(heads),
        width_(kHeadDim ? kHeadDim : width),
        columns_(cta_columns) {
    const int columns = max(0, min(columns_, width_ - rank_ * columns_));
    shared_.exchange.init(ctas_, ctas_ * heads * (2 + kSent * columns) * sizeof(float));
  }

  // All threads call this, once, before finish(). The CTA's heads begin at `first_row`.
  __device__ __forceinline__ void set_sinks(const Sinks& sinks, uint32_t first_row) {
    if (threadIdx.x < heads_) shared_.sinks[threadIdx.x] = sinks.in_base_2(first_row + threadIdx.x);
  }

  __device__ __forceinline__ void set_statistics(int head, float largest, float total) {
    shared_.of_warps[head][threadIdx.x / 32] = {largest, total};
  }

  // Where a warp stores its sum of a column, or a pack from it on. The swizzle puts the packs that
  // lanes store together, of four pairs of heads, in different banks.
  __device__ __forceinline__ int column_offset(int head, int column) const {
    if constexpr (kHeadDim == 0) return head * width_ + column;
    return head * kHeadDim + (column / 4 ^ (head / 2 % 2 | head / 4 % 2 * 4)) * 4 + column % 4;
  }

  // Merges all parts and writes the CTA's columns. All threads call this. The warps have stored
  // their sums in `of_warps`, `warp_bytes` from one warp to the next.
  template <typename T>
  __device__ __forceinline__ void finish(const char* of_warps, int warp_bytes,
                                         const MergeOutput<T>& target) {
    __syncthreads();
    send(of_warps, warp_bytes);
    shared_.exchange.wait(ctas_);
    reduce_received(target);
  }

 private:
  struct Shared {
    float2 of_warps[kMaxHeads][kWarps];       // the largest score and the total of the CTA's warps
    float2 received[kMaxHeads][kMaxCluster];  // the same of the cluster's CTAs
    float sinks[kMaxHeads];                   // in base 2
    ClusterExchange exchange;
    alignas(16) float received_sums[4];  // [ctas][kSent][heads][cta_columns]
  };

  // Floats from what one CTA sends to what the next one sends. The kMaxCluster CTAs' sums of
  // neighbouring columns are in different banks.
  __host__ __device__ static constexpr int stride(int count) {
    return (kSent * count + 31) / 32 * 32 + 32 / kMaxCluster;
  }

  __device__ __forceinline__ int divide_by_columns(int i) const {
    if constexpr (kHeadDim > 0) {
      return static_cast<uint32_t>(i * ctas_) / kHeadDim;
    } else {
      return i / columns_;
    }
  }

  // Sends each CTA the statistics of this CTA, and the sums of that CTA's columns, times their
  // weight in this CTA. A warp has a head and kWarpsEach warps' sums at a time.
  __device__ __forceinline__ void send(const char* of_warps, int warp_bytes) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < heads_ * kSent; item += kWarps) {
      const int head = item / kSent, sent = item % kSent;
      const float2 of_warp = shared_.of_warps[head][lane % kWarps];
      const float largest = from_ordered(__reduce_max_sync(kFullWarp, to_ordered(of_warp.x)));
      const float weight = weight_of_part(of_warp.x, largest);
      float total[1] = {weight * of_warp.y};
      sum_over_lanes<kWarps>(total);
      const char* const summands = of_warps + sent * kWarpsEach * warp_bytes;
      float* const received = shared_.received_sums + rank_ * stride(heads_ * columns_) +
                              (sent * heads_ + head) * columns_;
      // No lane leaves early: each has weights that the others read.
      for (int first = 0; first < width_; first += 32 * kPack) {
        const int column = min(first + lane * kPack, width_ - kPack);
        const char* summand = summands + column_offset(head, column) * sizeof(float);
        Pack<float, kPack> packs[kWarpsEach];
#pragma unroll
        for (int w = 0; w < kWarpsEach; ++w) {
          packs[w] = *reinterpret_cast<const Pack<float, kPack>*>(summand + w * warp_bytes);
        }
        float sum[kPack] = {};
#pragma unroll
        for (int w = 0; w < kWarpsEach; ++w) {
          const float of_pack = __shfl_sync(kFullWarp, weight, sent * kWarpsEach + w);
#pragma unroll
          for (int j = 0; j < kPack; ++j) sum[j] += of_pack * packs[w][j];
        }
        if (first + lane * kPack >= width_) continue;
        const int to = divide_by_columns(column);
        shared_.exchange.send(ctas_, to, received + column - to * columns_,
                              Pack<float, kPack>::of(sum));
      }
      if (sent == 0 && lane < ctas_) {
        shared_.exchange.send(ctas_, lane, &shared_.received[head][rank_],
                              float2{largest, total[0]});
      }
    }
  }

  // Adds up what the CTAs have sent, and writes it. Eight neighbouring lanes have a column of a
  // head, and each of them what one CTA sent.
  template <typename T>
  __device__ __forceinline__ void reduce_received(const MergeOutput<T>& target) {
    const int cta = threadIdx.x % kMaxCluster, count = heads_ * columns_;
    if (ctas_ == 1) {  // neighbouring threads have neighbouring columns
      for (int i = threadIdx.x; i < count; i += 32 * kWarps) {
        const int head = divide_by_columns(i);
        const float2 statistics = shared_.received[head][0];
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kSent; ++k) sum += shared_.received_sums[k * count + i];
        target.write(head, i - head * columns_, width_, sum, statistics.x, statistics.y,
                     shared_.sinks[head]);
      }
      return;
    }
    constexpr int kColumns = 32 / kMaxCluster;
    for (int first = threadIdx.x / 32 * kColumns; first < count; first += kWarps * kColumns) {
      const int i = min(first + static_cast<int>(threadIdx.x % 32) / kMaxCluster, count - 1);
      const int head = divide_by_columns(i), column = rank_ * columns_ + i - head * columns_;
      float2 statistics = {-INFINITY, 0.0f};
      float totals[2] = {};  // of the sums, and of the weights
      if (cta < ctas_) {
        statistics = shared_.received[head][cta];
        const float* sums = shared_.received_sums + cta * stride(count) + i;
#pragma unroll
        for (int k = 0; k < kSent; ++k) totals[0] += sums[k * count];
      }
      const float largest = max_over_lanes<kMaxCluster>(statistics.x);
      const float weight = weight_of_part(statistics.x, largest);
      totals[0] *= weight;
      totals[1] = weight * statistics.y;
      sum_over_lanes<kMaxCluster>(totals);
      if (cta == 0 && column < width_) {
        target.write(head, column, width_, totals[0], largest, totals[1], shared_.sinks[head]);
      }
    }
  }

  Shared& shared_;
  int ctas_, rank_, heads_, width_;
  int columns_;  // of a CTA
};

// The third level: merges the parts of `parts` clusters, a CTA for a head of a sequence.
template <typename T>
__global__ void decode_attention_merge_kernel(float* partial, T* out, int parts, int width,
                                              Sinks sinks) {
  const int64_t row = blockIdx.x, rows = gridDim.x;
  launch_dependent_grids();
  wait_on_dependent_grids();
  const float* statistics = partial + parts * rows * width;
  float largest = -INFINITY, total = 0.0f;
  for (int p = 0; p < parts; ++p) largest = fmaxf(largest, statistics[(p * rows + row) * 2]);
  for (int p = 0; p < parts; ++p) {
    const float* part = statistics + (p * rows + row) * 2;
    total += weight_of_part(part[0], largest) * part[1];
  }
  total = add_sink(total, largest, sinks.in_base_2(row));
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float weight = weight_of_part(statistics[(p * rows + row) * 2], largest);
      sum += weight * partial[(p * rows + row) * width + column];
    }
    out[row * width + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
  }
}

}  // namespace jaxllm::decode
