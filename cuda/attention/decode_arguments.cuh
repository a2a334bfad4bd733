// What a call of decode_attention is told, what a block of it works on, and how it reads words.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/decode_merge.cuh"

namespace jaxllm {

template <typename T, typename C>
struct Arguments {
  const T* q;
  const C *k, *v;
  const float *k_scales, *v_scales;
  const int32_t* lengths;
  float scale;
  T* out;
  float* partial;
  int heads, kv_heads, length, width;
  int64_t rows_of_sequence;  // of the cache
  int group;                 // query heads of a key head
  int head_blocks;           // blocks for them
  int most_heads;            // of a block
  int share;                 // columns of the result that a block of a cluster adds up
  int cluster;               // blocks of a cluster
  int clusters;              // for a sequence and these heads
  int splits;                // blocks along the cache
  int added;                 // tokens in the cache beyond `lengths`
  bool overlap;              // with the kernel before this one
};

// What a block works on.
struct Place {
  int sequence, kv_head, first_head, heads;
};

template <class Arguments>
__device__ __forceinline__ Place place_of(const Arguments& a) {
  Place place;
  place.sequence = blockIdx.z;
  const bool one_block = a.head_blocks == 1;  // then nobody waits for a division
  place.kv_head = one_block ? blockIdx.y : blockIdx.y / a.head_blocks;
  const int first = one_block ? 0 : blockIdx.y % a.head_blocks * kHeads;
  place.first_head = place.kv_head * a.group + first;
  place.heads = min(kHeads, a.group - first);
  return place;
}

// How many keys there are, by the length that a sequence is said to have.
template <class Arguments>
__device__ __forceinline__ int count_keys(const Arguments& a, int length) {
  return min(max(length + a.added, 0), a.length);
}

template <typename T, typename C>
__device__ __forceinline__ MergeTarget<T> target_of(const Arguments<T, C>& a, const Place& place) {
  return {a.out,
          a.partial,
          a.clusters,
          a.cluster,
          static_cast<uint32_t>(place.sequence * a.heads + place.first_head),
          gridDim.z * static_cast<uint32_t>(a.heads)};
}

// Eight or sixteen bytes of shared memory.
template <int kWords>
__device__ __forceinline__ void read_words(uint32_t (&words)[kWords], const char* source) {
  if constexpr (kWords == 4) {
    const uint4 found = *reinterpret_cast<const uint4*>(source);
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
  } else {
    const uint2 found = *reinterpret_cast<const uint2*>(source);
    words[0] = found.x, words[1] = found.y;
  }
}

// Words of two columns of a query: as many columns as a load of the cache brings, and the next at
// four times that distance, where other lanes' are between. `first` is the lane's first column.
template <typename T, int kLoads, int kWords>
__device__ __forceinline__ void load_columns(uint32_t (&q)[kLoads][kWords], const T* first) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 words = *reinterpret_cast<const uint4*>(first + j * 8 * kWords + i * 8);
      q[j][4 * i] = words.x, q[j][4 * i + 1] = words.y;
      q[j][4 * i + 2] = words.z, q[j][4 * i + 3] = words.w;
    }
  }
}

}  // namespace jaxllm
