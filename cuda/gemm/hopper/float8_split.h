// GEMMs of 8-bit floats whose depth is split among CTAs, on Hopper's tensor cores: for results of
// few tiles and a large depth, as weight gradients have.
#pragma once

#include "gemm/hopper/float8_matmul.h"

namespace jaxllm {

// The sides of a tile, that of a cluster: of 128 rows for each CTA, which share b.
inline constexpr int kFloat8SplitRows = 128, kFloat8SplitColumns = 192;

// As float8_matmul(), with the errors of that. `partial` is a workspace of
// partial_floats: (clusters + tiles) tiles, for as many clusters as the launch may have. More
// clusters than run at once are of no use. Also cudaErrorNotSupported where there is no room for a
// cluster, or the tiles are more than 16 times the clusters.
template <typename A, typename B, typename Out>
cudaError_t float8_split(cudaStream_t stream, const Float8Gemm<A, B, Out>& gemm,
                         const GemmShape& shape, Out* out, float* partial, int64_t partial_floats);

}  // namespace jaxllm
