// The parameters of decode_attention, and the work of a CTA.
//
//   grid.x   splits of the cache (split-KV), in clusters of `cluster` CTAs
//   grid.y   key heads, and for each of them tiles of at most kMaxHeads query heads
//   grid.z   sequences
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/decode/kv_rows.cuh"
#include "attention/decode/merge.cuh"

namespace jaxllm::decode {

// T is the type of q and out, C that of the caches.
template <typename T, typename C>
struct Params {
  const T* q;
  const C *k, *v;
  const float *k_scales, *v_scales;
  const int32_t* lengths;
  float scale;
  T* out;
  float* partial;
  int heads, kv_heads, length, width;
  int group;        // query heads of a key head
  int head_tiles;   // of a key head
  int max_heads;    // of a CTA
  int cta_columns;  // of the result, that a CTA of a cluster merges
  int cluster;      // CTAs of a cluster
  int clusters;     // for a sequence and these heads
  int splits;
  int added;     // tokens in the cache beyond `lengths`
  int window;    // the last tokens that the query sees; 0 for all
  bool overlap;  // with the kernel before this one
  Pages pages;   // if the cache is in pages
  Sinks sinks;
};

struct WorkTile {
  int sequence, kv_head, first_head, heads;
};

template <class Params>
__device__ __forceinline__ WorkTile work_tile(const Params& params) {
  WorkTile work;
  work.sequence = blockIdx.z;
  const bool one_tile = params.head_tiles == 1;  // then no thread waits for a division
  work.kv_head = one_tile ? blockIdx.y : blockIdx.y / params.head_tiles;
  const int first = one_tile ? 0 : blockIdx.y % params.head_tiles * kMaxHeads;
  work.first_head = work.kv_head * params.group + first;
  work.heads = min(kMaxHeads, params.group - first);
  return work;
}

// The keys of a sequence with this element of `lengths`.
template <class Params>
__device__ __forceinline__ int count_keys(const Params& params, int length) {
  return min(max(length + params.added, 0), params.length);
}

// The first of `keys` that the query sees.
template <class Params>
__device__ __forceinline__ int first_key(const Params& params, int keys) {
  return params.window == 0 ? 0 : max(keys - params.window, 0);
}

template <typename T, typename C>
__device__ __forceinline__ MergeOutput<T> merge_output(const Params<T, C>& params,
                                                       const WorkTile& work) {
  return {params.out,
          params.partial,
          params.clusters,
          params.cluster,
          static_cast<uint32_t>(work.sequence * params.heads + work.first_head),
          gridDim.z * static_cast<uint32_t>(params.heads)};
}

}  // namespace jaxllm::decode
