#include "common/shared_needs.h"
#include "gemm/float32/epilogue.cuh"
#include "gemm/float32/mainloop.cuh"
#include "gemm/float32/mainloop_hopper.cuh"
#include "gemm/float32/matmul_float32.h"

namespace jaxllm {
namespace {

template <class Tile, bool kMnMajorA, bool kMnMajorB>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinCtas)
    matmul_float32_kernel(const __grid_constant__ GemmParams<float> params) {
  extern __shared__ __align__(16) float stages[];
  const TileOrigin origin = tile_origin<Tile>(params);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / Tile::kWarpsN * Tile::kWarpM + lane / 4 * 4;
  const int column = warp % Tile::kWarpsN * Tile::kWarpN + lane % 4 * 4;
  typename Tile::Accumulator accumulator = {};
  float32_mainloop<Tile, kMnMajorA, kMnMajorB>(params, origin, row, column, stages, accumulator);
  float32_epilogue(params, accumulator, origin.row + row, origin.column + column,
                   [](int i) { return i / 4 * 32 + i % 4; });
}

// A thread has 16 x 8 outputs, and an SM one CTA. Where that leaves too many SMs idle, a thread has
// 8 x 8, or 4 x 8.
using LargeTile = Float32Tile<256, 128, 128, 32, 16, 3, 1>;
using SquareTile = Float32Tile<128, 128, 64, 32, 16, 3, 2>;
using SmallTile = Float32Tile<64, 64, 32, 32, 16, 3, 4>;

const SharedNeed kNeeds[] = {{"matmul_float32_large", LargeTile::kSmemBytes},
                             {"matmul_float32_square", SquareTile::kSmemBytes},
                             {"matmul_float32_small", SmallTile::kSmemBytes}};

template <class Tile>
cudaError_t launch(cudaStream_t stream, const MatmulCall<float>& call,
                   const GemmParams<float>& params) {
  return dispatch_majors(call, [&](auto a, auto b) {
    return launch_tiles<Tile>(stream, matmul_float32_kernel<Tile, a, b>, Tile::kSmemBytes, params);
  });
}

}  // namespace

cudaError_t matmul_float32(cudaStream_t stream, const MatmulCall<float>& call) {
  const GemmParams<float> params = make_params<4>(call);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  // The time of a tile: the waves of CTAs times the outputs of each. Smaller tiles take some
  // sixteenths more, because they load the operands more often.
  const auto time_of = [&](int64_t rows, int64_t columns, int sixteenths) {
    const int64_t tiles = divide_up(call.rows, rows) * divide_up(call.columns, columns);
    return divide_up(tiles, limits.sms) * rows * columns * sixteenths;
  };
  const int64_t large = time_of(LargeTile::kBlockM, LargeTile::kBlockN, 16);
  const int64_t square = time_of(SquareTile::kBlockM, SquareTile::kBlockN, 17);
  const int64_t small = time_of(SmallTile::kBlockM, SmallTile::kBlockN, 20);
  if (small < large && small < square) return launch<SmallTile>(stream, call, params);
  if (square < large) return launch<SquareTile>(stream, call, params);
  cudaError_t status = cudaErrorNotSupported;
  if (!call.transpose_b) {
    status = call.transpose_a ? launch_matmul_float32_hopper<true>(stream, params)
                              : launch_matmul_float32_hopper<false>(stream, params);
  }
  return status == cudaErrorNotSupported ? launch<LargeTile>(stream, call, params) : status;
}

}  // namespace jaxllm
