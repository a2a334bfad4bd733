// The sort of the embedding's backward pass: it groups the places of equal tokens, in order, so
// that each row's gradient adds up in a fixed order. A stable counting sort (LSD radix sort in two
// passes): first by the last bits of the token (its bucket), then by the other bits (its slot).
// Frequent tokens are close together in a vocabulary, and the last bits spread them. Rows are
// numbered bucket after bucket: row r is slot r % slots of bucket r / slots.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/reduce.cuh"
#include "embedding/embed.h"

namespace jaxllm {

__device__ __forceinline__ int clamped(int token, const EmbedShape& shape) {
  return min(max(token, 0), static_cast<int>(shape.vocabulary) - 1);
}

inline constexpr int kSortWarps = 8;
inline constexpr int kMaxKeys = kEmbedMaxKeys;

// Sorts entries [first, first + count) by a key below `keys`: each warp has a range of them.
struct CtaSort {
  int (&counts)[kSortWarps][kMaxKeys];
  int begin, end;  // this warp's range
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ CtaSort(int (&counts)[kSortWarps][kMaxKeys], int first, int count) : counts(counts) {
    const int size = (count + 32 * kSortWarps - 1) / (32 * kSortWarps) * 32;
    begin = first + min(warp * size, count);
    end = min(begin + size, first + count);
  }

  // Counts the keys in each warp's range.
  template <class KeyOf>
  __device__ void count(int keys, KeyOf key_of) {
    for (int key = lane; key < keys; key += 32) counts[warp][key] = 0;
    __syncwarp();
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) atomicAdd(&counts[warp][key_of(i)], 1);
    __syncthreads();
  }

  __device__ int total(int key) const {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) sum += counts[w][key];
    return sum;
  }

  // Replaces the warps' counts of this key by the positions where their entries go.
  __device__ void place(int key, int start) {
    for (int w = 0; w < kSortWarps; ++w) {
      const int key_count = counts[w][key];
      counts[w][key] = start;
      start += key_count;
    }
  }

  // Calls emit(i, target) for each entry; entries with one key keep their order.
  template <class KeyOf, class Emit>
  __device__ void distribute(KeyOf key_of, Emit emit) {
    for (int i = begin + lane; i - lane < end; i += 32) {
      const int key = i < end ? key_of(i) : -1;
      const unsigned equal = __match_any_sync(kFullWarp, key);
      const int before = __popc(equal & ((1u << lane) - 1));
      if (i < end) emit(i, counts[warp][key] + before);
      __syncwarp();
      if (i < end && before == 0) counts[warp][key] += __popc(equal);
      __syncwarp();
    }
  }
};

// An exclusive scan of counts, plus `start`. Only the first warp calls.
__device__ inline void exclusive_sums(int* counts, int keys, int start) {
  for (int first = 0; first < keys; first += 32) {
    const int key = first + threadIdx.x;
    const int key_count = key < keys ? counts[key] : 0;
    int sum = key_count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, sum, offset);
      if (threadIdx.x >= offset) sum += other;
    }
    if (key < keys) counts[key] = start + sum - key_count;
    start += __shfl_sync(kFullWarp, sum, 31);
  }
}

// The tokens of tile blockIdx.x of kEmbedTiles.
struct Tile {
  int first, count;
  __device__ explicit Tile(const EmbedShape& shape) {
    const int tokens = shape.tokens(), size = (tokens + kEmbedTiles - 1) / kEmbedTiles;
    first = min(static_cast<int>(blockIdx.x) * size, tokens);
    count = min(size, tokens - first);
  }
};

// Counts the tokens of a tile by bucket.
static __global__ void __launch_bounds__(32 * kSortWarps)
    embed_count_kernel(const int32_t* tokens, int32_t* tile_counts, EmbedShape shape) {
  __shared__ int counts[kSortWarps][kMaxKeys];
  const Tile tile(shape);
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int32_t* my_tokens = tokens + group * shape.tokens();
    CtaSort sort(counts, tile.first, tile.count);
    sort.count(shape.buckets,
               [&](int i) { return clamped(my_tokens[i], shape) & (shape.buckets - 1); });
    for (int bucket = threadIdx.x; bucket < shape.buckets; bucket += blockDim.x) {
      tile_counts[(group * kEmbedTiles + blockIdx.x) * shape.buckets + bucket] = sort.total(bucket);
    }
    __syncthreads();  // the counts may be written again
  }
}

// Sorts the tokens of a tile by bucket: `found` gets (slot, place), bucket after bucket and each in
// the order of places.
static __global__ void __launch_bounds__(32 * kSortWarps)
    embed_bucket_kernel(const int32_t* tokens, const int32_t* tile_counts, int2* found,
                        int32_t* starts, EmbedShape shape) {
  __shared__ int counts[kSortWarps][kMaxKeys], bucket_starts[kMaxKeys];
  const Tile tile(shape);
  const int buckets = shape.buckets, slots = shape.slots, bits = __popc(buckets - 1);
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int32_t* my_tokens = tokens + group * shape.tokens();
    int2* my_found = found + group * shape.tokens();
    int32_t* my_starts = starts + group * (int64_t{buckets} * slots + 1);
    const auto bucket_of = [&](int i) { return clamped(my_tokens[i], shape) & (buckets - 1); };
    CtaSort sort(counts, tile.first, tile.count);
    sort.count(buckets, bucket_of);

    // A tile's part of a bucket comes after the parts of the tiles before it.
    int before[kMaxKeys / (32 * kSortWarps)];
#pragma unroll
    for (int k = 0; k < kMaxKeys / (32 * kSortWarps); ++k) {
      const int bucket = threadIdx.x + k * blockDim.x;
      if (bucket >= buckets) break;
      int sum = 0;
#pragma unroll 16
      for (int t = 0; t < kEmbedTiles; ++t) {
        if (t == blockIdx.x) before[k] = sum;
        sum += tile_counts[(group * kEmbedTiles + t) * buckets + bucket];
      }
      bucket_starts[bucket] = sum;
    }
    __syncthreads();
    if (sort.warp == 0) exclusive_sums(bucket_starts, buckets, 0);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMaxKeys / (32 * kSortWarps); ++k) {
      const int bucket = threadIdx.x + k * blockDim.x;
      if (bucket >= buckets) break;
      sort.place(bucket, bucket_starts[bucket] + before[k]);
      if (blockIdx.x == 0) my_starts[int64_t{bucket} * slots] = bucket_starts[bucket];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) my_starts[int64_t{buckets} * slots] = shape.tokens();
    __syncthreads();
    sort.distribute(bucket_of, [&](int i, int target) {
      my_found[target] = make_int2(clamped(my_tokens[i], shape) >> bits, i);
    });
    __syncthreads();  // the counts may be written again
  }
}

// Sorts a bucket by slot.
static __global__ void __launch_bounds__(32 * kSortWarps)
    embed_slot_kernel(const int2* found, int32_t* places, int32_t* starts, EmbedShape shape) {
  __shared__ int counts[kSortWarps][kMaxKeys], slot_starts[kMaxKeys];
  const int slots = shape.slots;
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int2* my_found = found + group * shape.tokens();
    int32_t* my_places = places + group * shape.tokens();
    int32_t* my_starts = starts + group * (shape.buckets * slots + 1) + int64_t{blockIdx.x} * slots;
    const int first = my_starts[0], count = my_starts[slots] - first;
    const auto slot_of = [&](int i) { return my_found[i].x; };
    CtaSort sort(counts, first, count);
    sort.count(slots, slot_of);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      slot_starts[slot] = sort.total(slot);
    }
    __syncthreads();
    if (sort.warp == 0) exclusive_sums(slot_starts, slots, first);
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      sort.place(slot, slot_starts[slot]);
      if (slot > 0) my_starts[slot] = slot_starts[slot];
    }
    __syncthreads();
    sort.distribute(slot_of, [&](int i, int target) { my_places[target] = my_found[i].y; });
    __syncthreads();  // the counts may be written again
  }
}

}  // namespace jaxllm
