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

// Adds a bias, applies RoPE to queries and keys, and appends keys and values to the caches. A pair
// is columns j and j + width / 2 of a head, which RoPE rotates together.
template <typename T>
struct QkvRopeEpilogue {
  T *q, *k_cache, *v_cache;  // (rows, heads, width), (rows, length, kv_heads, width)
  const float *cos, *sin;    // (rows, width / 2)
  const int32_t* lengths;    // tokens so far; nothing is appended to a full cache but a ring
  int64_t heads, kv_heads, length, width;
  bool ring;
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
      int64_t position = lengths[row];
      if (ring && position >= length) position %= length;
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
