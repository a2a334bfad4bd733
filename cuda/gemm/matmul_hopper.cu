#include "common/column_sum.cuh"
#include "gemm/matmul_hopper.cuh"
#include "gemm/matmul_hopper.h"

namespace jaxllm {
namespace {

// The widest tiles whose accumulators leave registers to work with: the wider, the less copying.
using GeluTile = TileShape<192, 4, 1, 2>;
using SlopeTile = TileShape<192, 4, 1, 2>;
constexpr int kRowTilesAtATime = 16;  // of clusters

}  // namespace

template <typename T>
cudaError_t MatmulHopper<T>::bias_gelu(cudaStream_t stream, const T* x, const T* weight,
                                       const T* bias, T* h, T* out, int64_t rows, int64_t width,
                                       int64_t columns) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const HopperMatmul<T> call{rows, columns, width, x, weight, out, h, bias, nullptr};
  return launch_matmul<GeluTile, Epilogue::kBiasGelu, true>(stream, call, kRowTilesAtATime);
}

template <typename T>
cudaError_t MatmulHopper<T>::gelu_slope(cudaStream_t stream, const T* dout, const T* weight,
                                        const T* h, const T* bias, T* dh, T* dbias, float* partial,
                                        int64_t rows, int64_t width, int64_t columns) {
  if (columns == 0) return cudaSuccess;
  if (rows > 0) {
    const HopperMatmul<T> call{rows, columns, width, dout, weight, dh, h, bias, partial};
    JAXLLM_RETURN_IF_ERROR(
        (launch_matmul<SlopeTile, Epilogue::kGeluSlope, false>(stream, call, kRowTilesAtATime)));
  }
  const int64_t row_tiles = divide_up(rows, SlopeTile::kRows);
  return column_sum(stream, partial, {dbias}, 1, row_tiles, row_tiles, columns);
}

template struct MatmulHopper<__nv_bfloat16>;
template struct MatmulHopper<__half>;

}  // namespace jaxllm
