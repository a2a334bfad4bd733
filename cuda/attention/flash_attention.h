// Flash attention: attention over whole sequences without the matrix of scores in memory. A CTA
// computes a tile of it at a time. Tensor cores multiply bfloat16 and float16, CUDA cores float;
// accumulators are float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/head_rows.h"

namespace jaxllm {

// q is (batch, queries, heads, width), k (batch, keys, kv_heads, width), and out and v likewise
// with value_width; so are their gradients. Query head n reads key head n / (heads / kv_heads). lse
// and delta are dense (batch, heads, queries) arrays.
struct FlashShape {
  int64_t batch, queries, keys, heads, kv_heads, width;
  int64_t value_width = width;
};

// The smallest and the largest segment of a granule of rows.
struct SegmentRange {
  int32_t least, most;
};

// Rotary embeddings: q and k are rotated before their product, and dq and dk by the negative
// angles.
struct FlashRope {
  // Null for none; (tables, queries, pairs). Sequence b reads table b / (batch / tables). There are
  // as many keys as queries.
  const float *cos, *sin;
  int64_t tables, pairs;
  bool interleaved;  // as in rotary/rope.h
};

// An optional workspace. With enough bytes, 16-byte aligned, the kernels for Hopper serve the calls
// that they support (see hopper/launch.h); otherwise the kernels for every GPU do.
struct FlashScratch {
  void* data;
  int64_t bytes;
};

// The gradient of a packed projection's bias: the sum of the gradients of the projection's rows.
// Then q, k and v are parts of the rows of one array, with as many keys as queries, and so are
// their gradients. There are no rotary embeddings.
struct FlashBias {
  // Null for none; (groups, (heads + 2 kv_heads) * width) elements of q's type. Sequence b is in
  // group b / (batch / groups).
  void* gradient;
  int64_t groups;
  // A workspace for at least a row of the gradient of each group. The kernels for Hopper serve the
  // call only if it has the size that they need.
  float* partial;
  int64_t partial_size;
};

// What the kernel that wrote dout has computed: `delta`, like lse, and the sums of dout over every
// 128 queries of a sequence, (batch, queries / 128, heads * width). Null if nothing. Then the
// kernels for Hopper do not read out, if heads are 64 wide and share no keys, and the queries are
// whole tiles.
struct FlashSums {
  const float *delta, *dout;
};

// Scores, one for a query head, that join the denominators of its softmaxes without a key. The lse
// that they are in tells the backward of them.
struct FlashSinks {
  // Null for none; (groups, heads). Sequence b is in group b / (batch / groups).
  const float* data;
  int64_t groups;
};

// A bias on the scores, added after the scale and the softcap; a key with the bias -infinity is
// hidden. The kernels for Hopper do not serve it.
struct FlashScoreBias {
  // Null for none; (sequences, heads, queries, keys). Sequence b reads matrices b / (batch /
  // sequences): that of each query head, or where `heads` is 1 the one of all.
  const void* data;
  bool is_float32;  // else of q's type
  int64_t sequences, heads;
  void* gradient;  // of the backward, like `data`
};

struct FlashOptions {
  float scale;
  // Query t is at position p = t + keys - queries, and sees the keys p - left <= s <= p + right. A
  // negative number stands for a side without an end; under a causal mask right is 0.
  int64_t left, right;
  // If not 0, a score is softcap * tanh(scale * q * k / softcap).
  float softcap;
  // If not null, (batch, queries) and (batch, keys): a query sees its own segment alone.
  const int32_t* query_segments;
  const int32_t* key_segments;
  // Then a workspace of batch * flash_segment_ranges(queries, keys) elements.
  SegmentRange* segment_ranges;
  FlashSinks sinks;  // of the forward
  FlashScoreBias score_bias;
  FlashRope rope;
  // Whether the heads of q and dq are in parts: the first query of each key head, then the second
  // of each, and so on. Then there are as many keys as queries, and no bias of either kind.
  bool by_parts;
  // A workspace, where heads rotate or are in parts: for queries and keys, rotated and in the usual
  // order, batch * queries * (heads + kv_heads) * width elements of q's type; of the backward by
  // parts, for dq in the usual order, batch * queries * heads * width more.
  void* arranged;
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

// The columns that the kernels for Hopper have for a head in shared memory; 0 for a width that they
// do not serve.
inline int64_t flash_hopper_columns(int64_t width) {
  return width <= 0 || width > kFlashMaxWidth || width % 8 != 0 ? 0 : (width + 63) / 64 * 64;
}

// The one pair of widths that differ and have kernels, those for Hopper, and without a softcap:
// DeepSeek's multi-head latent attention.
inline constexpr int64_t kFlashLatentWidth = 192, kFlashLatentValueWidth = 128;
// Whether the kernels for Hopper serve these widths.
inline bool flash_has_hopper_widths(const FlashShape& s) {
  if (s.value_width == s.width) return flash_hopper_columns(s.width) > 0;
  return s.width == kFlashLatentWidth && s.value_width == kFlashLatentValueWidth;
}

// The sizes of the workspaces of the kernels for Hopper, in floats: at least as many as a call of
// these sizes needs.
inline constexpr int64_t kFlashHopperTile = 128;  // the fewest queries of the forward
inline constexpr int64_t kFlashHopperKeys = 64;   // the fewest keys of the backward
// The widest heads of which one kernel computes all gradients, and adds up dq in float32 in memory.
// Wider ones have a kernel for dq.
inline constexpr int64_t kFlashMaxFusedDqWidth = 128;
inline int64_t flash_backward_tile(int64_t width) {
  return flash_hopper_columns(width) == 64 ? 128 : 64;
}

inline int64_t flash_forward_scratch(const FlashShape& s) {
  return s.batch * (4 + 2 * ((s.queries + kFlashHopperTile - 1) / kFlashHopperTile));
}
inline int64_t flash_backward_scratch(const FlashShape& s) {
  const int64_t tile = flash_backward_tile(s.width), tiles = (s.queries + tile - 1) / tile;
  const int64_t ranges = tiles + (s.keys + kFlashHopperKeys - 1) / kFlashHopperKeys;
  if (s.width > kFlashMaxFusedDqWidth) {
    return s.batch * (s.heads * tiles * tile * 2 + 2 * ranges + 2);
  }
  const int64_t columns = flash_hopper_columns(s.width);
  return s.batch * (s.heads * tiles * (tile * (columns + 2) + 1) + 2 * ranges + 1);
}
// The partial sums of a bias's gradient in a group of sequences, for the kernels for Hopper, which
// sum it where heads have all columns, or for the others.
inline int64_t flash_bias_partial(const FlashShape& s, int64_t sequences, bool hopper) {
  constexpr int64_t kMostRows = 640;
  const int64_t columns = (s.heads + 2 * s.kv_heads) * s.width, rows = sequences * s.queries;
  if (!hopper) return (rows < kMostRows ? rows : kMostRows) * columns;
  const int64_t tile = flash_backward_tile(s.width), tiles = (s.queries + tile - 1) / tile;
  const int64_t sums = sequences * tiles * (tile / 64 + 1) * s.heads * s.width;
  return sums < columns ? columns : sums;  // a row at least, for calls that the other kernels serve
}

// Stored is the type of q, k and v: T, or a float8 (e4m3) with a scale for each head. The MMAs of
// float8 are of bfloat16, which holds every float8 exactly, so that only the weights and the result
// are rounded.
template <typename T, typename Stored = T>
struct FlashForward {
  FlashShape shape;
  FlashOptions options;
  HeadRows<const Stored> q = {}, k = {}, v = {};
  HeadRows<T> out = {};
  float* lse = nullptr;  // not written with float8
  const float *q_scale = nullptr, *k_scale = nullptr, *v_scale = nullptr;  // of float8
};

template <typename T>
struct FlashBackward {
  FlashShape shape;
  FlashOptions options;
  HeadRows<const T> q = {}, k = {}, v = {}, out = {}, dout = {};
  const float* lse = nullptr;
  float* delta = nullptr;       // like lse
  const float* dlse = nullptr;  // the gradient of lse, or null; not with a bias
  HeadRows<T> dq = {}, dk = {}, dv = {};
};

// T is float, __nv_bfloat16 or __half. Any sizes, zero included, up to kFlashMaxWidth and
// kFlashMaxLength, but at least one head; cudaErrorInvalidValue for others. Only the kernels for
// Hopper have a value_width that is not width; cudaErrorNotSupported where they do not serve it.
//
// out = softmax(scores) v, and lse = log(sum(e^scores)) over the keys that a query sees, and the
// sink of its head; zeros and -infinity where there are none. With float8, for T = __nv_bfloat16,
// no rotary embeddings, no sinks and no bias on the scores.
template <typename T, typename Stored>
cudaError_t flash_attention_forward(cudaStream_t stream, FlashForward<T, Stored> call);

// With p = e^(scores - lse), delta = sum(out * dout) and da = p * (dout v^T - delta), times the
// derivative of the softcap: dq = scale * da k, dk = scale * da^T q, dv = p^T dout. The same inputs
// give the same bits. With options.bias also its gradient. With options.score_bias also its
// gradient: p * (dout v^T - delta), summed in float over the sequences and heads that share an
// element; zero where no query sees the key. Writes delta - dlse to `delta`, from
// which the gradient of a sink follows, except with options.sums.
template <typename T>
cudaError_t flash_attention_backward(cudaStream_t stream, FlashBackward<T> call);

}  // namespace jaxllm
