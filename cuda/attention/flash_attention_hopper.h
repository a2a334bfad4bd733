// Attention on Hopper's tensor cores (sm_90a): bfloat16 and float16, heads of 64 or 128 elements.
//
// Query t of T stands at position p = t + S - T among the S keys, so that the last query stands at
// the last key, and sees the keys from p - left to p + right. Query head n reads key head
// n / (heads / kv_heads). The arrays are (batch, T or S, heads, width); their tokens may lie
// further apart than that, so that q, k and v may be parts of the rows of one projection.
//
//   out = softmax(scale * q k^T) v        lse = log of what the softmax divides by
//
// A query that sees no key has out = 0, lse = -inf, and no gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "attention/flash_attention.h"

namespace jaxllm {

struct HopperAttention {
  int64_t batch, queries, keys, heads, kv_heads, width;
  float scale;          // above zero
  int64_t left, right;  // kUnbounded: all that there are; causal: right = 0
  // Where not null, (batch, queries) and (batch, keys): a query sees its own segment alone.
  const int32_t *query_segments, *key_segments;
  // Then those of every kSegmentGranule queries of a sequence and, behind them, of its keys.
  const SegmentRange* segment_ranges;

  static constexpr int64_t kUnbounded = int64_t{1} << 29;
};

// The launchers launch and do nothing else, so they may be captured into a graph.
template <typename T>
struct FlashAttentionHopper {
  // Whether this GPU and build serve a call: not another kind of GPU, a build without sm_90a, other
  // widths, 2^29 tokens, a scale not above zero, nor arrays that begin or whose rows begin at no
  // multiple of 16 bytes. The launchers return cudaErrorNotSupported then.
  static bool serves(const HopperAttention& attention,
                     std::initializer_list<HeadRows<const T>> arrays);

  // The elements of workspace that the directions need: a few for each sequence, and about one for
  // each element of q. A workspace begins at a multiple of 128 bytes.
  static int64_t forward_workspace(const HopperAttention& attention);
  static int64_t backward_workspace(const HopperAttention& attention);
  // And those of the partial sums of a bias's gradient: for each tile of queries two rows of q or
  // three.
  static int64_t bias_partial(const HopperAttention& attention);

  // lse is (batch, heads, queries).
  static cudaError_t forward(cudaStream_t stream, const HopperAttention& attention,
                             HeadRows<const T> q, HeadRows<const T> k, HeadRows<const T> v,
                             HeadRows<T> out, float* lse, int* workspace);

  // Repeats bit for bit. The gradient of a bias, where one is asked for, has zeros for the keys: to
  // add a vector to all keys of a head adds one number to all scores of a query, and changes no
  // probability. For the values it has the sums of dout, since the probabilities of a query, which
  // sees itself at least, add up to one; for the queries the sums of dq, after it has been rounded.
  static cudaError_t backward(cudaStream_t stream, const HopperAttention& attention,
                              HeadRows<const T> q, HeadRows<const T> k, HeadRows<const T> v,
                              HeadRows<const T> out, const float* lse, HeadRows<const T> dout,
                              HeadRows<T> dq, HeadRows<T> dk, HeadRows<T> dv, float* workspace,
                              const FlashBias& bias, const FlashSums& sums);
};

}  // namespace jaxllm
