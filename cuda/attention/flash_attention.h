// Attention over whole sequences without their matrix of scores in memory: a block of threads holds
// a tile of it at a time. Products of bfloat16 and float16 run on tensor cores, of float on CUDA
// cores; sums are float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/head_rows.h"

namespace jaxllm {

// q, out and their gradients are (batch, queries, heads, width), k and v (batch, keys, kv_heads,
// width); query head n reads key head n / (heads / kv_heads). lse and delta are dense (batch,
// heads, queries) arrays.
struct FlashShape {
  int64_t batch, queries, keys, heads, kv_heads, width;
};

// The smallest and the largest segment of some neighbouring rows.
struct SegmentRange {
  int32_t least, most;
};

// Rotary embeddings: q and k turn before their product, and their gradients turn back.
struct FlashRope {
  // Null for none; (tables, queries, pairs), of which sequence b reads b / (batch / tables). There
  // are as many keys as queries.
  const float *cos, *sin;
  int64_t tables, pairs;
  bool interleaved;  // as in rotary/rope.h
  // A workspace of batch * queries * (heads + kv_heads) * width elements of q's type.
  void* turned;
};

// A workspace that a call need not have: with enough bytes, from a multiple of 16 on, Hopper's own
// kernels serve the call (see flash_attention_hopper.h) where they can; else those for every GPU.
struct FlashScratch {
  void* data;
  int64_t bytes;
};

// The gradient of a bias that was added to each row of a projection: the sum of those rows'
// gradients. Then q, k and v are parts of the rows of one array, with as many keys as queries, and
// so are their gradients; and no rotary embeddings turn them.
struct FlashBias {
  // Null for none; (groups, (heads + 2 kv_heads) * width) elements of q's type. Sequence b belongs
  // to group b / (batch / groups).
  void* gradient;
  int64_t groups;
  // A workspace with room for a row of the gradient in each group; Hopper's own kernels serve the
  // call where it has as much as they need.
  float* partial;
  int64_t partial_size;
};

// What whoever made dout knows of it: `delta`, like lse, and the sums of dout over every 128
// queries of a sequence, (batch, queries / 128, heads * width). Null for nothing. Hopper's own
// kernels need not read out then, where heads are 64 wide and share no keys, and the queries are
// whole tiles.
struct FlashSums {
  const float *delta, *dout;
};

struct FlashOptions {
  float scale;
  // Query t stands at key p = t + keys - queries, and sees the keys s <= p alone where `causal`,
  // and those with |p - s| < window where that is not 0.
  bool causal;
  int64_t window;
  // Where not 0, a score is softcap * tanh(scale * q * k / softcap).
  float softcap;
  // Where not null, (batch, queries) and (batch, keys): a query sees its own segment alone.
  const int32_t* query_segments;
  const int32_t* key_segments;
  // Then a workspace of batch * flash_segment_ranges(queries, keys) elements.
  SegmentRange* segment_ranges;
  FlashRope rope;
  FlashScratch scratch;
  FlashBias bias;  // of the backward
  FlashSums sums;  // likewise; with a bias
};

inline constexpr int64_t kFlashMaxWidth = 256;
inline constexpr int64_t kFlashMaxLength = int64_t{1} << 28;

// One range for every 32 queries, and one for every 32 keys.
inline constexpr int64_t kSegmentGranule = 32;
inline int64_t flash_segment_ranges(int64_t queries, int64_t keys) {
  return (queries + kSegmentGranule - 1) / kSegmentGranule +
         (keys + kSegmentGranule - 1) / kSegmentGranule;
}

// The sizes of workspaces, in floats; of Hopper's own kernels, for heads 64 or 128 wide, at least
// as many as a call of these sizes needs.
inline constexpr int64_t kFlashHopperTile = 128;  // keys, or the fewest queries of the forward
inline int64_t flash_backward_tile(int64_t width) { return width == 64 ? 128 : 64; }

inline int64_t flash_forward_scratch(const FlashShape& s) {
  return s.batch * (4 + 2 * ((s.queries + kFlashHopperTile - 1) / kFlashHopperTile));
}
inline int64_t flash_backward_scratch(const FlashShape& s) {
  const int64_t tile = flash_backward_tile(s.width), tiles = (s.queries + tile - 1) / tile;
  const int64_t ranges = tiles + (s.keys + kFlashHopperTile - 1) / kFlashHopperTile;
  return s.batch * (s.heads * tiles * (tile * (s.width + 2) + 1) + 2 * ranges + 1);
}
// The partial sums of a bias's gradient in a group of sequences, with room for Hopper's own kernels
// or without.
inline int64_t flash_bias_partial(const FlashShape& s, int64_t sequences, bool hopper) {
  constexpr int64_t kMostRows = 640;
  const int64_t columns = (s.heads + 2 * s.kv_heads) * s.width, rows = sequences * s.queries;
  if (!hopper) return (rows < kMostRows ? rows : kMostRows) * columns;
  const int64_t tile = flash_backward_tile(s.width), tiles = (s.queries + tile - 1) / tile;
  const int64_t sums = sequences * tiles * (tile / 64 + 1) * s.heads * s.width;
  return sums < columns ? columns : sums;  // a row at least, for calls that others serve
}

// T is float, __nv_bfloat16 or __half. Any sizes, of zero too, up to the two limits above, but at
// least one head. cudaErrorInvalidValue for others.
template <typename T>
struct FlashAttention {
  // out = softmax(scores) v, and lse = log(sum(e^scores)) over the keys that a query sees; zeros
  // and -infinity where it sees none.
  static cudaError_t forward(cudaStream_t stream, HeadRows<const T> q, HeadRows<const T> k,
                             HeadRows<const T> v, const FlashShape& shape,
                             const FlashOptions& options, HeadRows<T> out, float* lse);

  // With p = e^(scores - lse), delta = sum(out * dout) and da = p * (dout v^T - delta), times the
  // derivative of the softcap: dq = scale * da k, dk = scale * da^T q, dv = p^T dout. `delta` is a
  // workspace like lse. The same inputs give the same bits. With options.bias also its gradient.
  static cudaError_t backward(cudaStream_t stream, HeadRows<const T> q, HeadRows<const T> k,
                              HeadRows<const T> v, HeadRows<const T> out, const float* lse,
                              HeadRows<const T> dout, const FlashShape& shape,
                              const FlashOptions& options, HeadRows<T> dq, HeadRows<T> dk,
                              HeadRows<T> dv, float* delta);
};

// The forward of arrays in float8 (e4m3), each head of which is to be multiplied by a scale. The
// products are of bfloat16, which holds every float8 exactly, so that only the weights and the
// result are rounded. No rotary embeddings.
struct FlashAttentionFloat8 {
  static cudaError_t forward(cudaStream_t stream, HeadRows<const __nv_fp8_e4m3> q,
                             HeadRows<const __nv_fp8_e4m3> k, HeadRows<const __nv_fp8_e4m3> v,
                             const float* q_scale, const float* k_scale, const float* v_scale,
                             const FlashShape& shape, const FlashOptions& options,
                             HeadRows<__nv_bfloat16> out);
};

}  // namespace jaxllm
