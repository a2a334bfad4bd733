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

namespace jaxllm {

struct HopperAttention {
  int64_t batch, queries, keys, heads, kv_heads, width;
  float scale;          // above zero
  int64_t left, right;  // kUnbounded: all that there are; causal: right = 0

  static constexpr int64_t kUnbounded = int64_t{1} << 29;
};

// An array, and the number of elements from one token to the next.
template <typename T>
struct Tokens {
  T* data;
  int64_t stride;
};

// The launchers return cudaErrorNotSupported where they cannot serve: another kind of GPU, a build
// without sm_90a, another width, 2^29 tokens, or pointers or strides that are no multiples of 16
// bytes. They launch and do nothing else, so they may be captured into a graph.
template <typename T>
struct FlashAttentionHopper {
  // lse is (batch, heads, queries); counter is one element of workspace.
  static cudaError_t forward(cudaStream_t stream, const HopperAttention& attention,
                             Tokens<const T> q, Tokens<const T> k, Tokens<const T> v, Tokens<T> out,
                             float* lse, int* counter);

  // The elements of workspace that backward needs: about one float for each element of q.
  static int64_t backward_workspace(const HopperAttention& attention);

  // Repeats bit for bit. `workspace` begins at a multiple of 16 bytes.
  static cudaError_t backward(cudaStream_t stream, const HopperAttention& attention,
                              Tokens<const T> q, Tokens<const T> k, Tokens<const T> v,
                              Tokens<const T> out, const float* lse, Tokens<const T> dout,
                              Tokens<T> dq, Tokens<T> dk, Tokens<T> dv, float* workspace);
};

}  // namespace jaxllm
