#include "common/column_sum.cuh"
#include "gemm/matmul_hopper.cuh"
#include "gemm/matmul_hopper.h"

namespace jaxllm {
namespace {

// The widest tiles whose accumulators leave registers to work with: the wider, the less copying.
using MlpTile = TileShape<192, 4, 1, 2>;
// For any product; and for those that so wide tiles would leave multiprocessors idle with.
using PlainTile = TileShape<192, 4, 2, 1>;
using NarrowTile = TileShape<128, 5, 2, 1>;
using ResidualTile = PlainTile;
constexpr int kTilesOfOneRowAtATime = 1;

// In how many row tiles, of clusters, the tiles lie that are at work at once. If b stays in the L2
// cache, few: then all columns of a row are written at about the same time. GPT-2's products before
// GELU and before attention took 2 to 3% less time so on an H100. Else b is read again for each
// group of row tiles, and the more of them the better.
template <typename T>
int row_tiles_at_a_time(const HopperMatmul<T>& call) {
  constexpr int64_t kCachedBytes = int64_t{16} << 20;
  return call.columns * call.depth * int64_t{sizeof(T)} <= kCachedBytes ? 4 : 16;
}

template <class Shape, Epilogue kEpilogue, typename T>
cudaError_t launch_product(cudaStream_t stream, const MatmulCall<T>& call) {
  HopperMatmul<T> matmul{call.rows, call.columns, call.depth, call.a, call.b,
                         nullptr,   nullptr,      call.bias,  nullptr};
  if constexpr (kEpilogue == Epilogue::kWide) {
    matmul.wide_out = static_cast<float*>(call.out);
  } else {
    matmul.out = static_cast<T*>(call.out);
    matmul.saved = static_cast<const T*>(call.h);
  }
  const auto launch = [&](auto turn_a, auto turn_b) {
    return launch_matmul<Shape, kEpilogue, turn_a, turn_b>(stream, matmul,
                                                           row_tiles_at_a_time(matmul));
  };
  // In b as it comes the depth is across the rows.
  constexpr std::false_type along;
  constexpr std::true_type across;
  if (call.transpose_a) return call.transpose_b ? launch(across, along) : launch(across, across);
  return call.transpose_b ? launch(along, along) : launch(along, across);
}

cudaError_t forget_row_sums(cudaStream_t stream, float* sums, int64_t count) {
  return cudaMemsetAsync(sums, kMissingRowSum & 0xff, count * sizeof(float), stream);
}

// The time that tiles of a shape take: the turns of the GPU to do them, times the columns of each.
template <class Shape>
int64_t time_of(int64_t rows, int64_t columns, int multiprocessors) {
  const int64_t tiles = divide_up(rows, Shape::kRows) * divide_up(columns, Shape::kColumns);
  return divide_up(tiles, multiprocessors) * Shape::kColumns;
}

}  // namespace

template <typename T>
cudaError_t MatmulHopper<T>::product(cudaStream_t stream, const MatmulCall<T>& call) {
  const auto is_aligned = [](const void* pointer, int bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
  };
  // Pairs of biases, and of float32 results, are loaded and stored at once.
  if (call.columns % 2 != 0 || !is_aligned(call.bias, 4)) return cudaErrorNotSupported;
  if (call.wide) {
    if (call.gelu || !is_aligned(call.out, 8)) return cudaErrorNotSupported;
    return launch_product<NarrowTile, Epilogue::kWide>(stream, call);
  }
  if (call.gelu) return launch_product<PlainTile, Epilogue::kGelu>(stream, call);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  // A narrow tile takes a few hundredths longer than its share of a wide one.
  const int64_t plain = time_of<PlainTile>(call.rows, call.columns, limits.multiprocessors);
  const int64_t narrow = time_of<NarrowTile>(call.rows, call.columns, limits.multiprocessors);
  return 33 * narrow < 32 * plain ? launch_product<NarrowTile, Epilogue::kBias>(stream, call)
                                  : launch_product<PlainTile, Epilogue::kBias>(stream, call);
}

template <typename T>
cudaError_t MatmulHopper<T>::bias_gelu(cudaStream_t stream, const T* x, const T* weight,
                                       const T* bias, bool slope, T* saved, T* out, int64_t rows,
                                       int64_t width, int64_t columns) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  HopperMatmul<T> call{rows, columns, width, x, weight, out, saved, bias, nullptr};
  call.slopes = saved;
  const auto launch = slope ? launch_matmul<MlpTile, Epilogue::kGeluSlope, false, true, T>
                            : launch_matmul<MlpTile, Epilogue::kGelu, false, true, T>;
  return launch(stream, call, row_tiles_at_a_time(call));
}

template <typename T>
int64_t MatmulHopper<T>::slope_elements(int64_t rows, int64_t columns) {
  using Tile = MlpTile;
  constexpr int kClusterColumns = Tile::kColumns * Tile::kClusterColumns;
  static_assert(Tile::kClusterRows == 1);
  return divide_up(rows, Tile::kRows) * Tile::kRows * divide_up(columns, kClusterColumns) *
         kClusterColumns;
}

template <typename T>
cudaError_t MatmulHopper<T>::scale(cudaStream_t stream, const T* x, const T* weight,
                                   const T* slopes, T* out, T* sums, float* partial, int64_t rows,
                                   int64_t width, int64_t columns) {
  if (columns == 0) return cudaSuccess;
  if (rows > 0) {
    HopperMatmul<T> call{rows, columns, width, x, weight, out, nullptr, nullptr, partial};
    call.slopes = const_cast<T*>(slopes);
    JAXLLM_RETURN_IF_ERROR((launch_matmul<MlpTile, Epilogue::kScale, false, false>(
        stream, call, row_tiles_at_a_time(call))));
  }
  static_assert(kScaleRows == MlpTile::kRows);
  const int64_t row_tiles = divide_up(rows, kScaleRows);
  return column_sum(stream, partial, {sums}, 1, row_tiles, row_tiles, columns);
}

template <typename T>
cudaError_t MatmulHopper<T>::residual(cudaStream_t stream, const T* x, const T* weight,
                                      const T* bias, const T* residual, T* out, int64_t rows,
                                      int64_t width, int64_t columns) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const HopperMatmul<T> call{rows, columns, width, x, weight, out, residual, bias, nullptr};
  return launch_matmul<ResidualTile, Epilogue::kResidual, false, true>(stream, call,
                                                                       row_tiles_at_a_time(call));
}

template <typename T>
cudaError_t MatmulHopper<T>::head_sums(cudaStream_t stream, const T* x, const T* weight,
                                       const T* saved, T* out, float* sums, float* partial,
                                       int64_t tokens, int64_t rows, int64_t width,
                                       int64_t columns) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  static_assert(kHeadSumRows == ResidualTile::kRows && kHeadSumColumns == kSwizzleColumns);
  if (tokens % kHeadSumRows != 0 || columns % kHeadSumColumns != 0) return cudaErrorNotSupported;
  HopperMatmul<T> call{rows, columns, width, x, weight, out, saved, nullptr, partial};
  call.head_sums = sums;
  call.tokens = tokens;
  return launch_matmul<ResidualTile, Epilogue::kHeadSums, false, false>(stream, call,
                                                                        row_tiles_at_a_time(call));
}

template <typename T>
cudaError_t MatmulHopper<T>::norm_clusters(int* clusters) {
  static_assert(kNormColumns == ResidualTile::kColumns);
  int of_norm = 0, of_gradient = 0;
  cudaError_t status = find_clusters<ResidualTile, Epilogue::kNorm, false, true, T>(&of_norm);
  if (status == cudaSuccess) {
    status = find_clusters<ResidualTile, Epilogue::kNormGradient, false, false, T>(&of_gradient);
  }
  *clusters = status == cudaSuccess ? std::min(of_norm, of_gradient) : 0;
  return status == cudaErrorNotSupported ? cudaSuccess : status;
}

template <typename T>
int64_t MatmulHopper<T>::norm_row_sums(int64_t rows, int64_t columns) {
  using Tile = ResidualTile;
  constexpr int64_t kClusterRows = Tile::kRows * Tile::kClusterRows;
  return divide_up(rows, kClusterRows) * kClusterRows * divide_up(columns, Tile::kColumns) * 2;
}

template <typename T>
cudaError_t MatmulHopper<T>::norm(cudaStream_t stream, const T* x, const T* weight, const T* bias,
                                  const T* xhat, const float* mean, const float* rstd, float eps,
                                  T* out, float* new_mean, float* new_rstd, float* row_sums,
                                  int64_t rows, int64_t width, int64_t columns) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  HopperMatmul<T> call{rows, columns, width, x, weight, out, xhat, bias, nullptr};
  call.norm = {mean, rstd, row_sums, new_mean, new_rstd, eps};
  JAXLLM_RETURN_IF_ERROR(forget_row_sums(stream, row_sums, norm_row_sums(rows, columns)));
  return launch_matmul<ResidualTile, Epilogue::kNorm, false, true>(stream, call,
                                                                   kTilesOfOneRowAtATime);
}

template <typename T>
cudaError_t MatmulHopper<T>::norm_gradient(cudaStream_t stream, const T* dout, const T* weight,
                                           const T* xhat, const float* rstd, T* dtotal,
                                           T* dtotal_sum, float* partial, int64_t partial_floats,
                                           float* row_sums, int64_t rows, int64_t width,
                                           int64_t columns) {
  using Tile = ResidualTile;
  if (columns == 0) return cudaSuccess;
  // A row of partial sums for each warp of those blocks that have a tile of a row between them.
  static_assert(kNormPartialRows == Tile::kCluster * Tile::kMultipliers * 4);
  const int64_t column_tiles = divide_up(columns, Tile::kColumns);
  int64_t partial_rows = 0;
  if (rows > 0) {
    int clusters = 0;
    HopperMatmul<T> call{rows, columns, width, dout, weight, dtotal, xhat, nullptr, partial};
    call.norm = {nullptr, rstd, row_sums};
    call.most_clusters = partial_floats / (kNormPartialRows * columns) * column_tiles;
    call.clusters = &clusters;
    JAXLLM_RETURN_IF_ERROR(forget_row_sums(stream, row_sums, norm_row_sums(rows, columns)));
    JAXLLM_RETURN_IF_ERROR((launch_matmul<Tile, Epilogue::kNormGradient, false, false>(
        stream, call, kTilesOfOneRowAtATime)));
    partial_rows = clusters / column_tiles * kNormPartialRows;
  }
  return column_sum(stream, partial, {dtotal_sum}, 1, partial_rows, partial_rows, columns);
}

template <typename T>
cudaError_t MatmulHopper<T>::softmax(cudaStream_t stream, const T* x, const T* weight, bool turned,
                                     T* out, const SoftmaxRows& softmax, int64_t rows,
                                     int64_t width, int64_t columns) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  // Float16 has no exponents for it.
  if constexpr (std::is_same_v<T, __half>) {
    return cudaErrorNotSupported;
  } else {
    static_assert(kSoftmaxColumns == PlainTile::kColumns);
    HopperMatmul<T> call{rows, columns, width, x, weight, out, nullptr, nullptr, nullptr};
    call.softmax = softmax;
    const auto launch = turned ? launch_matmul<PlainTile, Epilogue::kSoftmax, false, false, T>
                               : launch_matmul<PlainTile, Epilogue::kSoftmax, false, true, T>;
    return launch(stream, call, row_tiles_at_a_time(call));
  }
}

template struct MatmulHopper<__nv_bfloat16>;
template struct MatmulHopper<__half>;

}  // namespace jaxllm
