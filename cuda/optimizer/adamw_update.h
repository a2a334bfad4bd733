// One step of AdamW for many arrays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace jaxllm {

// A parameter of `groups` times `size` elements, with its gradient and moments.
struct AdamWLeaf {
  void* param;  // in and out, as m and v
  const void* grad;
  float* m;
  float* v;
  void* copy;  // out: a rounded copy of the parameters; or null
  int64_t size;
  float weight_decay;
  int seed;  // the index of its seed in `seeds`
};

constexpr int kAdamWScalars = 5;

struct AdamWConstants {
  float b1, one_minus_b1, b2, one_minus_b2, eps;
};

// With g = grad * grad_scale, in float32:
//   m = b1 * m + (1 - b1) * g,  v = b2 * v + (1 - b2) * g^2,
//   param -= lr * (m * m_correction / (sqrt(v * v_correction) + eps) + weight_decay * param).
//
// A call holds `groups` independent steps (the axis that jax.vmap adds). `scalars` is an array
// (groups, kAdamWScalars) of lr, m_correction, v_correction, grad_scale and skip; where skip is not
// zero, param, m and v stay as they are. `seeds` is null, or an array (groups, seed_count) for
// stochastic rounding to bfloat16.
// P is the dtype of the parameters, G that of the gradients, C that of the copies.
template <typename P, typename G, typename C>
struct AdamW {
  static cudaError_t update(cudaStream_t stream, const std::vector<AdamWLeaf>& leaves,
                            const float* scalars, const uint32_t* seeds, int64_t seed_count,
                            AdamWConstants constants, int64_t groups);
};

}  // namespace jaxllm
