// A Llama transformer block that decodes one token for each sequence.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// A weight, (out, in), and for int8 the scales of its groups.
template <typename W>
struct BlockWeight {
  const W* data;
  const float* scales;
};

template <typename T, typename W>
struct BlockWeights {
  const T *norm1, *norm2;
  BlockWeight<W> qkv, out, gate_up, down;
  int64_t group;
};

struct BlockSizes {
  int64_t batch, width, heads, kv_heads, head_width, mlp_width, length, splits;
};

// The intermediates between the block's kernels.
template <typename T>
struct BlockWorkspace {
  T *q, *attended, *hidden, *activated;
  float* partial;
};

template <typename T, typename W>
struct TransformerBlock {
  // `residual` and `out` are the residual stream, (batch, width). Each cache gets one more token,
  // behind its `lengths`.
  static cudaError_t run(cudaStream_t stream, const T* residual, BlockWeights<T, W> weights,
                         const float* cos, const float* sin, const int32_t* lengths, T* k_cache,
                         T* v_cache, float eps, T* out, BlockWorkspace<T> workspace,
                         BlockSizes sizes);
};

}  // namespace jaxllm
