// The global norm of many arrays: the square root of the sum of all squares.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace jaxllm {

enum class LeafType { kFloat, kBFloat16, kHalf };

// One array of `groups` times `size` elements.
struct NormLeaf {
  const void* x;
  int64_t size;
  LeafType type;
};

// Chunks are multiples of this, which keeps 16-byte loads aligned.
inline constexpr int64_t kNormChunkStep = 2048;

// norm = sqrt(sum(x^2)) over all leaves, in float32 and in a fixed order. A call holds `groups`
// independent problems (the axis that jax.vmap adds), and `norm` has one value for each. A CTA adds
// `chunk` elements of a leaf, a multiple of kNormChunkStep; `partial` is a workspace of (groups,
// partials) floats, one for each CTA, where `partials` is global_norm_partials().
cudaError_t global_norm(cudaStream_t stream, const std::vector<NormLeaf>& leaves, float* norm,
                        float* partial, int64_t partials, int64_t chunk, int64_t groups);

int64_t global_norm_partials(const std::vector<NormLeaf>& leaves, int64_t chunk);

}  // namespace jaxllm
