// The bias on an accumulator of scores.
#pragma once

#include <type_traits>

#include "attention/mask.cuh"
#include "attention/mma/tile.cuh"
#include "attention/score_bias.cuh"
#include "common/fast_math.cuh"

namespace jaxllm::attention {

// Two neighbouring elements of the bias, and their rounding.
__device__ __forceinline__ float2 load_two(const float* source) {
  return *reinterpret_cast<const float2*>(source);
}
template <typename T>
__device__ __forceinline__ float2 load_two(const T* source) {
  return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(source));
}
__device__ __forceinline__ void store_two(float* target, float x, float y) {
  *reinterpret_cast<float2*>(target) = {x, y};
}
template <typename T>
__device__ __forceinline__ void store_two(T* target, float x, float y) {
  *reinterpret_cast<uint32_t*>(target) = pack_pair<T>(x, y);
}

// Whether two elements in neighbouring columns, of which the first is even, may be moved at once.
template <typename Element>
__device__ __forceinline__ bool has_pairs(const Element* matrix, int keys) {
  return keys % 2 == 0 && reinterpret_cast<std::uintptr_t>(matrix) % (2 * sizeof(Element)) == 0;
}

// Calls function(row, column, m, h, n) for the first of each two elements that a lane has of a row
// of an accumulator, the part of a matrix whose element (0, 0) is at first_row and first_column.
template <int kMTiles, int kNTiles, class Function>
__device__ __forceinline__ void for_each_pair(int first_row, int first_column, Function function) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 16 * m + 8 * h;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        function(row, first_column + 2 * (lane % 4) + 8 * n, m, h, n);
      }
    }
  }
}

// The bias of an accumulator's elements; 0 past the last query and the last key. A row of the
// matrix is a query: of the accumulator too, or a column of it.
template <Rows kOwn, int kMTiles, int kNTiles, typename Element>
__device__ __forceinline__ void load_bias_elements(float (&bias)[kMTiles][kNTiles][4],
                                                   const Element* matrix, int queries, int keys,
                                                   int first_row, int first_column) {
  constexpr bool kRowsAreQueries = kOwn == Rows::kQueries;
  if (kRowsAreQueries && has_pairs(matrix, keys)) {
    for_each_pair<kMTiles, kNTiles>(first_row, first_column,
                                    [&](int query, int key, int m, int h, int n) {
                                      float2 pair = {};
                                      if (query < queries && key < keys)
                                        pair = load_two(matrix + int64_t{query} * keys + key);
                                      bias[m][n][2 * h] = pair.x, bias[m][n][2 * h + 1] = pair.y;
                                    });
    return;
  }
  for_each_pair<kMTiles, kNTiles>(
      first_row, first_column, [&](int row, int column, int m, int h, int n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = kRowsAreQueries ? row : column + c;
          const int key = kRowsAreQueries ? column + c : row;
          const bool valid = query < queries && key < keys;
          bias[m][n][2 * h + c] = valid ? to_float(matrix[int64_t{query} * keys + key]) : 0.0f;
        }
      });
}

// The bias, float or T, of the scores of a sequence's query head.
template <Rows kOwn, typename T, int kMTiles, int kNTiles>
__device__ __forceinline__ void load_bias(float (&bias)[kMTiles][kNTiles][4],
                                          const ScoreBias& params, int b, int head,
                                          const Mask& mask, int first_row, int first_column) {
  const int queries = mask.queries, keys = mask.keys;
  const int64_t offset = params.matrix_of(b, head, queries, keys);
  if (params.is_float32) {
    load_bias_elements<kOwn>(bias, static_cast<const float*>(params.data) + offset, queries, keys,
                             first_row, first_column);
  } else {
    load_bias_elements<kOwn>(bias, static_cast<const T*>(params.data) + offset, queries, keys,
                             first_row, first_column);
  }
}

// A score in base 2, or what is added to it, with a bias in base e.
__device__ __forceinline__ float biased(float score, float bias) {
  return fmaf(bias, kLog2E, score);
}

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void add_bias(float (&s)[kMTiles][kNTiles][4],
                                         const float (&bias)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = biased(s[m][n][i], bias[m][n][i]);
    }
  }
}

// Writes a tile of the bias's gradient, whose rows are queries.
template <int kMTiles, int kNTiles, typename Element>
__device__ __forceinline__ void store_bias_gradient(const float (&acc)[kMTiles][kNTiles][4],
                                                    Element* matrix, int queries, int keys,
                                                    int first_row, int first_column) {
  if (has_pairs(matrix, keys)) {
    for_each_pair<kMTiles, kNTiles>(
        first_row, first_column, [&](int query, int key, int m, int h, int n) {
          if (query >= queries || key >= keys) return;
          store_two(matrix + int64_t{query} * keys + key, acc[m][n][2 * h], acc[m][n][2 * h + 1]);
        });
    return;
  }
  for_each_pair<kMTiles, kNTiles>(
      first_row, first_column, [&](int query, int key, int m, int h, int n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (query >= queries || key + c >= keys) continue;
          matrix[int64_t{query} * keys + key + c] = from_float<Element>(acc[m][n][2 * h + c]);
        }
      });
}

}  // namespace jaxllm::attention
