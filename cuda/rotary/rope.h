// Rotary position embeddings (RoPE): pairs of columns rotate by the angle of their position.
//
// T is the dtype of queries and keys; the tables are float32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/head_rows.h"

namespace jaxllm {

// The sizes of a call. The tables hold `length` rows for each of `tables` groups of sequences, so
// sequence s reads group s / (sequences / tables).
struct RopeShape {
  int64_t sequences, length, tables;
  int64_t q_heads, k_heads;
  int64_t width;  // columns of a head
  int64_t pairs;  // pairs of columns that rotate; the columns from 2 * pairs on are copied
  // With g query heads a key head, query head n stands at (n % g) * k_heads + n / g in q, or in
  // q_out, where this is g, and not 1: the first query of each key head, then the second, ...
  int q_group = 1, q_out_group = 1;
};

template <typename T>
struct Rope {
  // out_a = a * cos - b * sin and out_b = a * sin + b * cos, where the pair (a, b) is columns i and
  // i + pairs, or 2 * i and 2 * i + 1 if `interleaved`. `inverse` rotates by the negative angle.
  // The results may overwrite q and k.
  static cudaError_t rotate(cudaStream_t stream, HeadRows<const T> q, HeadRows<const T> k,
                            const float* cos, const float* sin, HeadRows<T> q_out,
                            HeadRows<T> k_out, bool interleaved, bool inverse,
                            const RopeShape& shape);
};

}  // namespace jaxllm
