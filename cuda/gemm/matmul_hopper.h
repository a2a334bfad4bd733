// Matrix products by Hopper's tensor cores, with what follows them in a network.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// What becomes of the product p = a b before it is stored.
enum class Epilogue {
  kNone,       // out = p
  kBias,       // out = p + bias
  kBiasGelu,   // h = p, out = gelu(p + bias)
  kGeluSlope,  // out = p gelu'(h + bias), and partial sums of its columns
};

// One call: a of (rows, depth) or turned (depth, rows), b turned (depth, columns) or (columns,
// depth), out and h of (rows, columns), bias of (columns).
template <typename T>
struct HopperMatmul {
  int64_t rows, columns, depth;
  const T* a;
  const T* b;
  T* out;
  T* h = nullptr;
  const T* bias = nullptr;
  float* partial = nullptr;
};

}  // namespace jaxllm
