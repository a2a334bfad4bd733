// What the kernels of flash attention share, whatever they multiply with: what a block works on,
// and how it is launched.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "attention/flash_attention.h"
#include "attention/flash_mask.cuh"
#include "common/dependent_launch.cuh"
#include "common/launch.h"

namespace jaxllm::attention {

// The checks that every launcher makes.
inline bool is_supported(const FlashShape& shape) {
  return shape.width <= kFlashMaxWidth && shape.queries <= kFlashMaxLength &&
         shape.keys <= kFlashMaxLength && shape.batch <= INT_MAX && shape.heads <= INT_MAX &&
         shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0;
}

// The rows of one head of one sequence.
template <typename T>
__device__ T* head_of(const HeadRows<T>& rows, int b, int length, int head, int width) {
  return rows.data + int64_t{b} * length * rows.row_stride + int64_t{head} * width;
}

// Where a block stands in a grid of `tiles` for each head of each sequence. The heads of a tile
// come first, since they share what they read, then the sequence's other tiles.
struct Place {
  int b, tile, head;

  __device__ Place(int tiles, int heads) {
    head = blockIdx.x % heads;
    tile = blockIdx.x / heads % tiles;
    b = blockIdx.x / heads / tiles;
  }
};

// Launches `kernel` with `blocks` blocks, and with as much dynamic shared memory.
template <class Kernel, class Arguments>
cudaError_t launch_tiles(cudaStream_t stream, Kernel kernel, int64_t blocks, int threads,
                         int shared_bytes, const Arguments& arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(blocks));
  launch.block = dim3(threads);
  launch.shared = shared_bytes;
  return launch_kernel(stream, kernel, launch, arguments);
}

}  // namespace jaxllm::attention
