// Attention of one query of each sequence with a cache of keys and values (split-KV).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// The sizes of a call: out and q are (batch, heads, width), the caches (batch, length, kv_heads,
// width), their scales (batch, length, kv_heads).
//
// With a block table the caches are pools of pages, (pages, page, kv_heads, width), and `length` is
// what the pages of a sequence hold: token t of a sequence is row t % page of page table[t / page].
struct DecodeSizes {
  int64_t batch, heads, kv_heads, length, width;
  int64_t pages = 0, page = 0;  // of a pool, and the tokens of a page; 0 without a block table
  int64_t groups = 1;           // of the sequences, each with its own pool and its own sinks
  int64_t window = 0;           // the last tokens that a query sees; 0 for all
  int64_t added = 0;            // tokens that each cache has beyond its `lengths`
  bool overlap = false;         // may start before the end of the kernel before it on the stream
};

// T is the type of q and out, C that of the caches: T, or int8_t with scales.
template <typename T, typename C>
struct DecodeArrays {
  const T* q;
  const C *k, *v;
  const float *k_scales, *v_scales;  // null for other caches than int8
  const int32_t* lengths;            // the number of keys of each sequence
  T* out;
  // A workspace of splits * batch * heads * (width + 2) floats; not used if there is one split.
  float* partial;
  const int32_t* block_table = nullptr;  // (batch, length / page)
  const float* sinks = nullptr;          // (groups, heads); null for none
};

template <typename T, typename C>
struct CachedAttention {
  static cudaError_t run(cudaStream_t stream, DecodeArrays<T, C> arrays, float scale,
                         DecodeSizes sizes, int64_t splits);
};

}  // namespace jaxllm
