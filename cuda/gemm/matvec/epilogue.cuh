// Epilogues of the GEMV kernels.
//
// An epilogue pairs the outputs, which are rows of the weights, so that two outputs that it
// combines meet in one thread. Pair i has outputs first(i) and second(i). The kernels call store(i,
// row of x, first product, second product) once for each pair and row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/vector.cuh"

namespace jaxllm {

// The weight row of one half of a pair. Past the end it is the last row, and nothing is stored.
template <class Epilogue>
__device__ __forceinline__ int64_t weight_row(const Epilogue& epilogue, int64_t pair, int half) {
  return min(half == 0 ? epilogue.first(pair) : epilogue.second(pair), epilogue.outputs() - 1);
}

// Stores the products, plus a residual, or a bias, where there is one. A pair's outputs are eight
// apart.
template <typename T>
struct StoreEpilogue {
  T* out;             // (rows, count)
  const T* residual;  // may be null
  int64_t count;
  bool is_bias = false;  // `residual` has one row, which is added to all

  __host__ __device__ int64_t pairs() const { return (count + 15) / 16 * 8; }
  __device__ int64_t first(int64_t i) const { return i / 8 * 16 + i % 8; }
  __device__ int64_t second(int64_t i) const { return first(i) + 8; }
  __host__ __device__ int64_t outputs() const { return count; }
  __device__ void store(int64_t i, int64_t row, float a, float b) const {
    store_one(first(i), row, a);
    store_one(second(i), row, b);
  }
  __device__ void store_one(int64_t at, int64_t row, float product) const {
    if (at >= count) return;
    const int64_t to = at + row * count;
    if (residual != nullptr) product += to_float(residual[is_bias ? at : to]);
    out[to] = from_float<T>(product);
  }
};

// SwiGLU, silu(gate) * up. The weights have the rows of the gate first.
template <typename T>
struct SwigluEpilogue {
  T* out;  // (rows, count)
  int64_t count;

  __host__ __device__ int64_t pairs() const { return count; }
  __device__ int64_t first(int64_t i) const { return i; }
  __device__ int64_t second(int64_t i) const { return count + i; }
  __host__ __device__ int64_t outputs() const { return 2 * count; }
  __device__ void store(int64_t i, int64_t row, float gate, float up) const {
    out[row * count + i] = from_float<T>(gate / (1.0f + __expf(-gate)) * up);
  }
};

// Where the new token of each sequence goes in a cache: in one piece or in pages, as in
// attention/decode/kv_rows.cuh, or in a ring.
struct NewTokenRows {
  const int32_t* lengths;          // the tokens of each sequence so far
  int64_t slots;                   // of a sequence
  bool ring = false;               // of as many slots: the new token replaces the oldest
  const int32_t* table = nullptr;  // (rows, slots / page), or null
  int64_t page = 0, pages = 0;     // the tokens of a page, and the pages of the pool

  // The row of the cache; -1 where there is no room.
  __device__ int64_t row(int64_t sequence) const {
    int64_t token = lengths[sequence];
    if (ring && token >= slots) token %= slots;
    if (token < 0 || token >= slots) return -1;
    if (table == nullptr) return sequence * slots + token;
    const int64_t number = table[sequence * (slots / page) + token / page];
    return number < 0 || number >= pages ? -1 : number * page + token % page;
  }
};

// Adds a bias, applies RoPE to queries and keys, and appends keys and values to the caches. A pair
// is columns j and j + width / 2 of a head, which RoPE rotates together.
template <typename T>
struct QkvRopeEpilogue {
  T *q, *k_cache, *v_cache;  // (rows, heads, width), (cache rows, kv_heads, width)
  const float *cos, *sin;    // (rows, width / 2)
  NewTokenRows new_rows;
  int64_t heads, kv_heads, width;
  const T* bias = nullptr;  // (outputs,), or null

  __host__ __device__ int64_t pairs() const { return (heads + 2 * kv_heads) * (width / 2); }
  __device__ int64_t first(int64_t i) const { return i / (width / 2) * width + i % (width / 2); }
  __device__ int64_t second(int64_t i) const { return first(i) + width / 2; }
  __host__ __device__ int64_t outputs() const { return 2 * pairs(); }
  __device__ void store(int64_t i, int64_t row, float a, float b) const {
    const int64_t half = width / 2, j = i % half;
    int64_t head = i / half;
    if (bias != nullptr) {
      a += to_float(bias[first(i)]);
      b += to_float(bias[second(i)]);
    }
    if (head < heads + kv_heads) {
      const float c = cos[row * half + j], s = sin[row * half + j];
      const float rotated = a * c - b * s;
      b = a * s + b * c;
      a = rotated;
    }
    T* target = q + (row * heads + head) * width;
    if (head >= heads) {
      const int64_t new_row = new_rows.row(row);
      if (new_row < 0) return;
      head -= heads;
      T* cache = head < kv_heads ? k_cache : v_cache;
      head = head < kv_heads ? head : head - kv_heads;
      target = cache + (new_row * kv_heads + head) * width;
    }
    target[j] = from_float<T>(a);
    target[j + half] = from_float<T>(b);
  }
};

}  // namespace jaxllm
