#include <algorithm>

#include "common/shared_needs.h"
#include "gemm/mma/epilogue.cuh"
#include "gemm/mma/mainloop.cuh"
#include "gemm/mma/matmul_mma.h"

namespace jaxllm {
namespace {

template <bool kMnMajorA, bool kMnMajorB, typename T>
__global__ void __launch_bounds__(MmaTile<T>::kThreads, 2)
    matmul_mma_kernel(const __grid_constant__ GemmParams<T> params) {
  using Tile = MmaTile<T>;
  extern __shared__ __align__(16) unsigned char smem[];
  const TileOrigin origin = tile_origin<Tile>(params);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % 2 * Tile::kWarpM, warp_column = warp / 2 * Tile::kWarpN;
  typename Tile::Accumulator accumulator = {};
  mma_mainloop<kMnMajorA, kMnMajorB>(params, origin, warp_row, warp_column,
                                     reinterpret_cast<T*>(smem), accumulator);
  mma_epilogue(params, accumulator, origin.row + warp_row + lane / 4,
               origin.column + warp_column + lane % 4 * 2);
}

template <typename T>
constexpr int max_smem_bytes() {
  const auto bytes = MmaTile<T>::smem_bytes;
  return std::max({bytes(false, false), bytes(false, true), bytes(true, false), bytes(true, true)});
}

const SharedNeed kNeeds[] = {{"matmul_mma_float32", max_smem_bytes<float>()},
                             {"matmul_mma_16_bits", max_smem_bytes<__half>()}};

}  // namespace

template <typename T>
cudaError_t MatmulMma<T>::run(cudaStream_t stream, const MatmulCall<T>& call) {
  return dispatch_majors(call, [&](auto a, auto b) {
    using Tile = MmaTile<T>;
    return launch_tiles<Tile>(stream, matmul_mma_kernel<a, b, T>, Tile::smem_bytes(a, b),
                              make_params<2>(call));
  });
}

template struct MatmulMma<float>;
template struct MatmulMma<__nv_bfloat16>;
template struct MatmulMma<__half>;

}  // namespace jaxllm
