// One block of a Llama, for one token a sequence.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// A matrix, (out, in), and for int8 the scales of its groups.
template <typename W>
struct BlockMatrix {
  const W* data;
  const float* scales;
};

template <typename T, typename W>
struct BlockWeights {
  const T *norm1, *norm2;
  BlockMatrix<W> qkv, out, gate_up, down;
  int64_t group;
};

struct BlockSizes {
  int64_t batch, width, heads, kv_heads, head_width, mlp_width, length, splits;
};

// What the block's kernels hand to each other.
template <typename T>
struct BlockWorkspace {
  T *q, *attended, *hidden, *activated;
  float* partial;
};

template <typename T, typename W>
struct TransformerBlock {
  // `residual`, (batch, width), goes through the block into `out`; each cache gets one more token,
  // behind the `lengths` it has.
  static cudaError_t run(cudaStream_t stream, const T* residual, BlockWeights<T, W> weights,
                         const float* cos, const float* sin, const int32_t* lengths, T* k_cache,
                         T* v_cache, float eps, T* out, BlockWorkspace<T> workspace,
                         BlockSizes sizes);
};

}  // namespace jaxllm
