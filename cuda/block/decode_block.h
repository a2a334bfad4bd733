// A Llama transformer block that decodes one token for each sequence.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// A weight, (out, in), and for int8 the scales of its groups.
template <typename W>
struct BlockWeight {
  const W* data;
  const float* scales;
};

template <typename T, typename W>
struct BlockWeights {
  const T *norm1, *norm2;
  const T* qkv_bias;         // null for none
  const T *q_norm, *k_norm;  // the norms of heads, both null for none
  BlockWeight<W> qkv, out, gate_up, down;
  int64_t group;
};

// `length` is the slots of a sequence, in one piece or in pages.
struct BlockSizes {
  int64_t batch, width, heads, kv_heads, head_width, mlp_width, length, splits;
  bool ring;            // a full cache's new token replaces its oldest
  int64_t window;       // the last tokens that a query sees; 0 for all
  int64_t page, pages;  // the tokens of a page, 0 for a cache in one piece; the pages of the pool
};

// The keys and values of all sequences: (batch, length, kv_heads, head_width), or a pool of pages.
template <typename T>
struct BlockCache {
  T *k, *v;
  const int32_t* lengths;  // the tokens of each sequence without the new one
  const int32_t* table;    // (batch, length / page); null for a cache in one piece
  // With a table: the tokens of each sequence with the new one, as far as it has pages.
  const int32_t* keys;
};

// The intermediates between the block's kernels.
template <typename T>
struct BlockWorkspace {
  T* qkv;  // with norms of heads
  T *q, *attended, *hidden, *activated;
  float* partial;
};

template <typename T, typename W>
struct TransformerBlock {
  // `residual` and `out` are the residual stream, (batch, width). The cache gets one more token of
  // each sequence, behind its `lengths`, or in a ring at its `lengths` modulo the slots.
  static cudaError_t run(cudaStream_t stream, const T* residual, BlockWeights<T, W> weights,
                         const float* cos, const float* sin, BlockCache<T> cache, float eps, T* out,
                         BlockWorkspace<T> workspace, BlockSizes sizes);
};

}  // namespace jaxllm
