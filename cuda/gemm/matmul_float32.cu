#include "common/shared_needs.h"
#include "common/vector.cuh"
#include "gemm/matmul_float32.cuh"
#include "gemm/matmul_float32.h"
#include "gemm/matmul_float32_hopper.cuh"

namespace jaxllm {
namespace {

// A thread has 16 x 8 results, and its multiprocessor one block. Where that leaves too many
// multiprocessors idle, a thread has 8 x 8, or 4 x 8.
using LargeTile = Float32Tile<256, 128, 128, 32, 16, 3, 1>;
using SquareTile = Float32Tile<128, 128, 64, 32, 16, 3, 2>;
using SmallTile = Float32Tile<64, 64, 32, 32, 16, 3, 4>;
constexpr int kRowTilesAtATime = 16;

const SharedNeed kNeeds[] = {{"matmul_float32_large", LargeTile::kBytes},
                             {"matmul_float32_square", SquareTile::kBytes},
                             {"matmul_float32_small", SmallTile::kBytes}};

template <class Tile>
cudaError_t launch(cudaStream_t stream, const MatmulCall<float>& call,
                   const Float32Matmul& matmul) {
  // In b as it comes the depth is across the rows.
  if (call.transpose_a) {
    return call.transpose_b ? launch_matmul_float32<Tile, true, false>(stream, matmul)
                            : launch_matmul_float32<Tile, true, true>(stream, matmul);
  }
  return call.transpose_b ? launch_matmul_float32<Tile, false, false>(stream, matmul)
                          : launch_matmul_float32<Tile, false, true>(stream, matmul);
}

}  // namespace

cudaError_t matmul_float32(cudaStream_t stream, const MatmulCall<float>& call) {
  float* const out = static_cast<float*>(call.out);
  float* const h = call.gelu ? static_cast<float*>(call.h) : nullptr;
  const Float32Matmul matmul{
      {call.a, call.rows, call.depth, aligned_16(call.a) && call.rows % 4 == 0},
      {call.b, call.columns, call.depth, aligned_16(call.b) && call.columns % 4 == 0},
      call.bias,
      h,
      out,
      call.gelu,
      aligned_16(out, h) && call.columns % 4 == 0,
      kRowTilesAtATime};
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  // The time that tiles take: the turns of the GPU to do them, times the results of each. Smaller
  // tiles take some sixteenths more for what they read more often.
  const auto time_of = [&](int64_t rows, int64_t columns, int sixteenths) {
    const int64_t tiles = divide_up(call.rows, rows) * divide_up(call.columns, columns);
    return divide_up(tiles, limits.multiprocessors) * rows * columns * sixteenths;
  };
  const int64_t large = time_of(LargeTile::kRows, LargeTile::kColumns, 16);
  const int64_t square = time_of(SquareTile::kRows, SquareTile::kColumns, 17);
  const int64_t small = time_of(SmallTile::kRows, SmallTile::kColumns, 20);
  if (small < large && small < square) return launch<SmallTile>(stream, call, matmul);
  if (square < large) return launch<SquareTile>(stream, call, matmul);
  cudaError_t status = cudaErrorNotSupported;
  if (!call.transpose_b) {
    status = call.transpose_a ? launch_matmul_float32_hopper<true>(stream, matmul)
                              : launch_matmul_float32_hopper<false>(stream, matmul);
  }
  return status == cudaErrorNotSupported ? launch<LargeTile>(stream, call, matmul) : status;
}

}  // namespace jaxllm
