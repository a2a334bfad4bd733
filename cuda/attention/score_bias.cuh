// A bias on the scores, which sequences and heads may share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/flash_attention.h"

namespace jaxllm::attention {

// The matrices of the bias, (queries, keys) each, and those of its gradient.
struct ScoreBias {
  const void* data;  // null for none
  void* gradient;    // of the backward
  bool is_float32;   // else of q's type
  int sequences;     // of the batch that share a matrix
  int heads;         // of the bias: 1, or all

  static ScoreBias of_call(const FlashShape& shape, const FlashScoreBias& bias) {
    if (bias.data == nullptr) return {};
    return {bias.data, bias.gradient, bias.is_float32,
            static_cast<int>(shape.batch / bias.sequences), static_cast<int>(bias.heads)};
  }

  // The first element of the matrix of a sequence and query head, counted from that of the first.
  __device__ __forceinline__ int64_t matrix_of(int b, int head, int queries, int keys) const {
    const int64_t matrix = int64_t{b / sequences} * heads + (heads == 1 ? 0 : head);
    return matrix * queries * keys;
  }
};

// The tile of queries and keys of a CTA that computes a tile of the gradient, and the members, the
// pairs of a sequence and a query head, that share it. CTAs of all keys of a tile of queries run
// next to each other.
struct ScoreBiasTile {
  int query_tile, key_tile;
  int matrix;  // of the gradient
  int first_b, first_head;
  int heads;  // that share the matrix
  int members;

  __device__ ScoreBiasTile(const ScoreBias& bias, int all_heads, int query_tiles, int key_tiles) {
    key_tile = blockIdx.x % key_tiles;
    query_tile = blockIdx.x / key_tiles % query_tiles;
    matrix = blockIdx.x / key_tiles / query_tiles;
    heads = bias.heads == 1 ? all_heads : 1;
    first_b = matrix / bias.heads * bias.sequences;
    first_head = matrix % bias.heads;
    members = bias.sequences * heads;
  }

  // Where the matrix begins.
  __device__ int64_t offset(int queries, int keys) const {
    return int64_t{matrix} * queries * keys;
  }

  __device__ int b_of(int member) const { return first_b + member / heads; }
  __device__ int head_of(int member) const { return first_head + member % heads; }
};

}  // namespace jaxllm::attention
