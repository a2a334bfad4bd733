// Gradients of weights by Hopper's tensor cores: products whose depth, the tokens, is far more than
// their result's sides.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// dweight = x^T dout: x (tokens, rows), dout (tokens, columns), dweight (rows, columns).
template <typename T>
struct WeightGradient {
  const T* x;
  const T* dout;
  T* dweight;
  int64_t rows, columns;
};

// The side of a tile of a gradient, in elements.
inline constexpr int64_t kGradientTileRows = 256, kGradientTileColumns = 192;

// Makes two gradients, of as many tokens each, in one kernel. `partial` is a workspace of
// partial_floats, which are (blocks + tiles) tiles for as many blocks as the launch may have, no
// fewer than there are tiles. More than the GPU has multiprocessors are of no use. Sides are
// multiples of eight elements and pointers of 16 bytes, and the tiles are no more than the GPU has
// multiprocessors, or this returns cudaErrorNotSupported; so it does on other GPUs than Hopper's.
template <typename T>
cudaError_t weight_gradients(cudaStream_t stream, const WeightGradient<T> (&gradients)[2],
                             int64_t tokens, float* partial, int64_t partial_floats);

}  // namespace jaxllm
