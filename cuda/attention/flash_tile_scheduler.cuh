// The work tiles of flash attention: how a grid is launched, and which tile a CTA has.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "attention/flash_attention.h"
#include "attention/mask.cuh"
#include "common/dependent_launch.cuh"
#include "common/launch.h"

namespace jaxllm::attention {

// The rows of head `head` of sequence b.
template <typename T>
__device__ T* head_of(const HeadRows<T>& rows, int b, int length, int head, int width) {
  return rows.data + int64_t{b} * length * rows.row_stride + int64_t{head} * width;
}

// The tile of this CTA, in a grid of `tiles` for each head of each sequence. CTAs of all heads of a
// tile run next to each other, since they share what they read; then come the sequence's other
// tiles.
struct WorkTile {
  int b, tile, head;

  __device__ WorkTile(int tiles, int heads) {
    head = blockIdx.x % heads;
    tile = blockIdx.x / heads % tiles;
    b = blockIdx.x / heads / tiles;
  }
};

// Launches a CTA for each of `tiles` work tiles.
template <class Kernel, class Params>
cudaError_t launch_tiles(cudaStream_t stream, Kernel kernel, int64_t tiles, int threads,
                         int smem_bytes, const Params& params) {
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(tiles));
  return launch_kernel(stream, kernel, {grid, dim3(threads), static_cast<size_t>(smem_bytes)},
                       params);
}

}  // namespace jaxllm::attention
