// What becomes of the products of a matrix and a few rows of x.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/vector.cuh"

namespace jaxllm {

// An epilogue pairs rows of the matrix, so that two products that need each other meet in one
// thread: pair i consists of rows first(i) and second(i), and store(i, row of x, product, product)
// is called once for each.

// Products as they are, and perhaps a residual. Pairs are rows eight apart.
template <typename T>
struct StoreProducts {
  T* out;             // (rows, count)
  const T* residual;  // may be null
  int64_t count;

  __host__ __device__ int64_t pairs() const { return (count + 15) / 16 * 8; }
  __device__ int64_t first(int64_t i) const { return i / 8 * 16 + i % 8; }
  __device__ int64_t second(int64_t i) const { return first(i) + 8; }
  __host__ __device__ int64_t rows() const { return count; }
  __device__ void store(int64_t i, int64_t row, float a, float b) const {
    store_one(first(i), row, a);
    store_one(second(i), row, b);
  }
  __device__ void store_one(int64_t at, int64_t row, float product) const {
    if (at >= count) return;
    at += row * count;
    out[at] = from_float<T>(residual == nullptr ? product : product + to_float(residual[at]));
  }
};

// silu(gate) * up, where the gates' rows come first.
template <typename T>
struct StoreSwiglu {
  T* out;  // (rows, count)
  int64_t count;

  __host__ __device__ int64_t pairs() const { return count; }
  __device__ int64_t first(int64_t i) const { return i; }
  __device__ int64_t second(int64_t i) const { return count + i; }
  __host__ __device__ int64_t rows() const { return 2 * count; }
  __device__ void store(int64_t i, int64_t row, float gate, float up) const {
    out[row * count + i] = from_float<T>(gate / (1.0f + __expf(-gate)) * up);
  }
};

// Queries, keys and values: queries and keys are turned by the angles of their position, and keys
// and values go into the caches behind the tokens that are there. A pair is columns j and j + width
// / 2 of a head, which turn together.
template <typename T>
struct StoreQkv {
  T *q, *k_cache, *v_cache;  // (rows, heads, width), (rows, length, kv_heads, width)
  const float *cos, *sin;    // (rows, width / 2)
  const int32_t* lengths;    // tokens in the cache; a full one gets no more
  int64_t heads, kv_heads, length, width;

  __host__ __device__ int64_t pairs() const { return (heads + 2 * kv_heads) * (width / 2); }
  __device__ int64_t first(int64_t i) const { return i / (width / 2) * width + i % (width / 2); }
  __device__ int64_t second(int64_t i) const { return first(i) + width / 2; }
  __host__ __device__ int64_t rows() const { return 2 * pairs(); }
  __device__ void store(int64_t i, int64_t row, float a, float b) const {
    const int64_t half = width / 2, j = i % half;
    int64_t head = i / half;
    if (head < heads + kv_heads) {
      const float c = cos[row * half + j], s = sin[row * half + j];
      const float turned = a * c - b * s;
      b = a * s + b * c;
      a = turned;
    }
    T* target = q + (row * heads + head) * width;
    if (head >= heads) {
      const int64_t position = lengths[row];
      if (position < 0 || position >= length) return;
      head -= heads;
      T* cache = head < kv_heads ? k_cache : v_cache;
      head = head < kv_heads ? head : head - kv_heads;
      target = cache + ((row * length + position) * kv_heads + head) * width;
    }
    target[j] = from_float<T>(a);
    target[j + half] = from_float<T>(b);
  }
};

}  // namespace jaxllm
