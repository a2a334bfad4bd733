// Weight gradients by Hopper's tensor cores: GEMMs whose depth, the tokens, is far more than their
// result's sides.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// dweight = x^T dout: x (tokens, rows), dout (tokens, columns), dweight (rows, columns).
template <typename T>
struct Wgrad {
  const T* x;
  const T* dout;
  T* dweight;
  int64_t rows, columns;
};

// The sides of a tile of a gradient, in elements.
inline constexpr int64_t kWgradTileRows = 256, kWgradTileColumns = 192;

// Computes two gradients, of as many tokens each, in one kernel, and adds their parts in a second.
// `partial` is a workspace of partial_floats: (CTAs + tiles) tiles, for as many CTAs as the launch
// may have, no fewer than there are tiles. More CTAs than the GPU has SMs are of no use. Sides are
// multiples of eight elements and pointers of 16 bytes, and the tiles are no more than the GPU has
// SMs, or this returns cudaErrorNotSupported; so it does on other GPUs than Hopper's.
template <typename T>
cudaError_t wgrad_pair(cudaStream_t stream, const Wgrad<T> (&gradients)[2], int64_t tokens,
                       float* partial, int64_t partial_floats);

}  // namespace jaxllm
