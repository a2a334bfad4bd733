#include <algorithm>

#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "norm/layer_norm.h"
#include "norm/rows.cuh"
#include "norm/strategies.h"

namespace jaxllm {
namespace {

// A team of threads holds a row in registers: it is read once, however often the sums need it.
template <class Strategy, bool kExact, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Strategy::Team::kMaxThreads, Strategy::kMinBlocks)
    layer_norm_forward_kernel(const T* x, const T* residual, const W* x_bias, const W* scale,
                              const W* bias, float eps, T* out, T* h, float* mean, float* rstd,
                              int64_t rows, int width) {
  constexpr int kVector = kPackSize<T>, kPacks = Strategy::kPacks;
  constexpr bool kStreams = Strategy::kStreams;
  typename Strategy::Team team;
  const int64_t row_in_group = block_from_the_end() * team.kRowsPerBlock + team.row();
  // Lanes beyond the last row only meet in the sums.
  const bool is_row = team.kRowsPerBlock == 1 || row_in_group < rows;
  const int64_t row = blockIdx.y * rows + row_in_group;
  scale += int64_t{blockIdx.y} * width;
  bias += int64_t{blockIdx.y} * width;
  const float per_column = __fdividef(1.0f, width);

  Pack<T> packs[kPacks] = {};
  load_row<kExact, kStreams>(team, packs, x + row * width, width, is_row);
  if constexpr (kAdd) {
    if (x_bias) x_bias += int64_t{blockIdx.y} * width;
    add_and_store<kExact, kStreams>(team, packs, residual + row * width, x_bias, h + row * width,
                                    width, is_row);
  }

  Pack<W, kVector> scales[kPacks] = {}, biases[kPacks] = {};
  if constexpr (Strategy::kWeightsFirst) {
    load_weights<kExact>(team, scales, scale, width);
    load_weights<kExact>(team, biases, bias, width);
  }

  float values[kPacks][kVector];
  float sum[1] = {0.0f};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float of_pack = 0.0f;  // a sum of its own: the packs' additions need not wait for each other
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[p][i] = packs[p][i];
      of_pack += values[p][i];
    }
    sum[0] += of_pack;
  }
  team.sum(sum);
  const float row_mean = sum[0] * per_column;

  float squares[1] = {0.0f};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const bool is_inside = kExact || pack_column<T>(team, p) < width;
    float of_pack = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[p][i] = is_inside ? values[p][i] - row_mean : 0.0f;
      of_pack += values[p][i] * values[p][i];
    }
    squares[0] += of_pack;
  }
  team.sum(squares);
  const float row_rstd = rsqrtf(squares[0] * per_column + eps);

  if (!is_row) return;
  if (mean && team.thread() == 0) {
    store_statistic(mean + row, row_mean);
    store_statistic(rstd + row, row_rstd);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(team, p);
    if (!kExact && column >= width) continue;
    if constexpr (!Strategy::kWeightsFirst) {
      scales[p] = load_cached<kVector>(scale + column);
      biases[p] = load_cached<kVector>(bias + column);
    }
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      result[i] = values[p][i] * row_rstd * scales[p][i] + biases[p][i];
    }
    store_pack<kStreams>(Pack<T>::of(result), out + row * width + column);
  }
}

// Rows of any width and alignment: a block a row, one element at a time, read from memory (the
// cache, as a rule) for each of the three passes.
template <bool kAdd, typename T, typename W>
__global__ void layer_norm_forward_any_width_kernel(const T* x, const T* residual, const W* x_bias,
                                                    const W* scale, const W* bias, float eps,
                                                    T* out, T* h, float* mean, float* rstd,
                                                    int64_t rows, int64_t width) {
  BlockPerRow<kAnyWidthThreads> team;
  if (x_bias) x_bias += blockIdx.y * width;
  scale += blockIdx.y * width;
  bias += blockIdx.y * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t offset = (blockIdx.y * rows + row) * width;
    const T* source = kAdd ? h + offset : x + offset;
    float sum[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      if constexpr (kAdd) {
        const float of_column = x_bias ? to_float(x_bias[i]) : 0.0f;
        const float branch = to_float(x[offset + i]) + of_column;
        h[offset + i] = from_float<T>(branch + to_float(residual[offset + i]));
      }
      sum[0] += to_float(source[i]);
    }
    team.sum(sum);
    const float row_mean = sum[0] / width;

    float squares[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float centred = to_float(source[i]) - row_mean;
      squares[0] += centred * centred;
    }
    team.sum(squares);
    const float row_rstd = rsqrtf(squares[0] / width + eps);

    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float n = (to_float(source[i]) - row_mean) * row_rstd;
      out[offset + i] = from_float<T>(n * to_float(scale[i]) + to_float(bias[i]));
    }
    if (mean && threadIdx.x == 0) {
      mean[blockIdx.y * rows + row] = row_mean;
      rstd[blockIdx.y * rows + row] = row_rstd;
    }
  }
}

// The blocks stay on their multiprocessors and loop over tiles of rows. Each thread adds up the
// weight gradients of its columns over all rows that it visits, with kXBias dx as well; at the end
// the block writes them as one partial row.
template <class Team, int kPacks, int kRows, bool kAdd, bool kXBias, typename T, typename W>
__global__ void __launch_bounds__(Team::kMaxThreads)
    layer_norm_backward_kernel(const T* x, const W* scale, const float* mean, const float* rstd,
                               const T* dout, const T* dh, T* dx, float* partial, int64_t rows,
                               int width, int64_t partial_rows) {
  constexpr int kVector = kPackSize<T>;
  constexpr int kTileRows = kRows * Team::kRowsPerBlock;
  Team team;
  extern __shared__ int4 shared_memory[];
  TileRing<Team, T, kPacks, kRows, kAdd ? 3 : 2> ring{shared_memory};

  const int64_t first_row = blockIdx.y * rows;
  const float per_column = __fdividef(1.0f, width);
  Pack<W, kVector> scales[kPacks] = {};
  load_weights<false>(team, scales, scale + int64_t{blockIdx.y} * width, width);
  float dscale[kPacks][kVector] = {}, dbias[kPacks][kVector] = {}, dx_bias[kPacks][kVector] = {};

  const int64_t stride = int64_t{gridDim.x} * kTileRows;
  const auto row_in_tile = [&](int r) { return r * Team::kRowsPerBlock + team.row(); };
  float next_mean[kRows], next_rstd[kRows];
  const auto fetch = [&](int tile, int64_t tile_row) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile_row + row_in_tile(r);
      const bool is_row = row >= 0 && row < rows;
      const int64_t offset = (first_row + row) * width;
      if constexpr (kAdd) {
        ring.fetch(team, tile, r, {x + offset, dout + offset, dh + offset}, width, is_row);
      } else {
        ring.fetch(team, tile, r, {x + offset, dout + offset}, width, is_row);
      }
      next_mean[r] = is_row ? load_for_later(mean + first_row + row) : 0.0f;
      next_rstd[r] = is_row ? load_for_later(rstd + first_row + row) : 0.0f;
    }
    ring.commit();
  };

  // From the last rows on: see rows.cuh.
  int64_t tile_row = ((rows - 1) / kTileRows - blockIdx.x) * kTileRows;
  fetch(0, tile_row);
  for (int tile = 0; tile_row >= 0; tile_row -= stride, tile ^= 1) {
    float row_mean[kRows], row_rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_mean[r] = next_mean[r], row_rstd[r] = next_rstd[r];
    fetch(tile ^ 1, tile_row - stride);
    ring.wait_for_previous();

    // With c = x - mean, so that n = c * rstd: the sums of g and of g * c.
    float sums[2 * kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Pack<T> xs = ring.read(tile, r, 0, p), douts = ring.read(tile, r, 1, p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float c = xs[i] - row_mean[r];
          const float g = douts[i] * scales[p][i];
          sums[2 * r] += g;
          sums[2 * r + 1] += g * c;
          dscale[p][i] += douts[i] * row_rstd[r] * c;
          dbias[p][i] += douts[i];
        }
      }
    }
    team.sum(sums);
    forget_unpacked(scales);

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile_row + row_in_tile(r);
      if (row >= rows) continue;
      // dx = rstd * (g - mean(g) - n * mean(g * n)), and n * mean(g * n) = c * of_c.
      const float mean_g = sums[2 * r] * per_column;
      const float of_c = row_rstd[r] * row_rstd[r] * sums[2 * r + 1] * per_column;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = pack_column<T>(team, p);
        if (column >= width) continue;
        const Pack<T> xs = ring.read(tile, r, 0, p), douts = ring.read(tile, r, 1, p);
        float result[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float c = xs[i] - row_mean[r];
          // Rounded as in the sum, not fused: else a row of one column would have a gradient.
          const float g = __fmul_rn(douts[i], scales[p][i]);
          result[i] = row_rstd[r] * (g - mean_g - c * of_c);
        }
        if constexpr (kAdd) {
          const Pack<T> dhs = ring.read(tile, r, 2, p);
#pragma unroll
          for (int i = 0; i < kVector; ++i) result[i] += dhs[i];
        }
        if constexpr (kXBias) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) dx_bias[p][i] += result[i];
        }
        store(dx + (first_row + row) * width + column, Pack<T>::of(result));
      }
    }
    forget_unpacked(scales);
  }

  constexpr int kSums = kXBias ? 3 : 2;
  float* my_partial = partial + (kSums * blockIdx.y * partial_rows + blockIdx.x) * width;
  store_column_sums<T>(team, dscale, my_partial, width);
  store_column_sums<T>(team, dbias, my_partial + partial_rows * width, width);
  if constexpr (kXBias) {
    store_column_sums<T>(team, dx_bias, my_partial + 2 * partial_rows * width, width);
  }
}

// dx for rows of any width and alignment, a block a row.
template <bool kAdd, typename T, typename W>
__global__ void layer_norm_backward_any_width_kernel(const T* x, const W* scale, const float* mean,
                                                     const float* rstd, const T* dout, const T* dh,
                                                     T* dx, int64_t rows, int64_t width) {
  BlockPerRow<kAnyWidthThreads> team;
  scale += blockIdx.y * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float row_mean = mean[blockIdx.y * rows + row], row_rstd = rstd[blockIdx.y * rows + row];
    const int64_t offset = (blockIdx.y * rows + row) * width;
    float sums[2] = {0.0f, 0.0f};  // of g, and of g * n
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float g = __fmul_rn(to_float(dout[offset + i]), to_float(scale[i]));
      sums[0] += g;
      sums[1] += g * (to_float(x[offset + i]) - row_mean) * row_rstd;
    }
    team.sum(sums);
    const float mean_g = sums[0] / width, mean_gn = sums[1] / width;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float n = (to_float(x[offset + i]) - row_mean) * row_rstd;
      const float g = __fmul_rn(to_float(dout[offset + i]), to_float(scale[i]));
      float value = row_rstd * (g - mean_g - n * mean_gn);
      if constexpr (kAdd) value += to_float(dh[offset + i]);
      dx[offset + i] = from_float<T>(value);
    }
  }
}

// dscale, dbias and, with kXBias, the sums of dx for any width: a thread a column, a block for
// every gridDim.z-th row.
template <bool kXBias, typename T>
__global__ void layer_norm_backward_columns_kernel(const T* x, const float* mean, const float* rstd,
                                                   const T* dout, const T* dx, float* partial,
                                                   int64_t rows, int64_t width,
                                                   int64_t partial_rows) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float dscale = 0.0f, dbias = 0.0f, dx_bias = 0.0f;
  for (int64_t row = blockIdx.z; row < rows; row += gridDim.z) {
    const int64_t my_row = blockIdx.y * rows + row;
    const float d = to_float(dout[my_row * width + column]);
    dscale += d * (to_float(x[my_row * width + column]) - mean[my_row]) * rstd[my_row];
    dbias += d;
    if constexpr (kXBias) dx_bias += to_float(dx[my_row * width + column]);
  }
  constexpr int kSums = kXBias ? 3 : 2;
  float* my_partial = partial + (kSums * blockIdx.y * partial_rows + blockIdx.z) * width + column;
  my_partial[0] = dscale;
  my_partial[partial_rows * width] = dbias;
  if constexpr (kXBias) my_partial[2 * partial_rows * width] = dx_bias;
}

template <bool kAdd, typename T, typename W>
cudaError_t launch_forward(cudaStream_t stream, const T* x, const T* residual, const W* x_bias,
                           const W* scale, const W* bias, float eps, T* out, T* h, float* mean,
                           float* rstd, int64_t groups, int64_t rows, int64_t width) {
  cudaError_t status = cudaSuccess;
  const bool served =
      rows_are_aligned<T>(width, x, residual, x_bias, scale, bias, out, h) &&
      choose_forward<2, kAdd>(width / kPackSize<T>, [&](auto strategy, int threads) {
        // A team for each row of each group.
        using S = decltype(strategy);
        const dim3 grid(divide_up(rows, S::Team::kRowsPerBlock), groups);
        const bool exact = width == int64_t{S::kPacks} * S::threads_per_row(threads) * kPackSize<T>;
        const auto kernel = exact ? layer_norm_forward_kernel<S, true, kAdd, T, W>
                                  : layer_norm_forward_kernel<S, false, kAdd, T, W>;
        status = launch_kernel(stream, kernel, {grid, threads}, x, residual, x_bias, scale, bias,
                               eps, out, h, mean, rstd, rows, static_cast<int>(width));
        return true;
      });
  if (served) return status;
  return launch_kernel(stream, layer_norm_forward_any_width_kernel<kAdd, T, W>,
                       {dim3(any_width_blocks(rows), groups), kAnyWidthThreads}, x, residual,
                       x_bias, scale, bias, eps, out, h, mean, rstd, rows, width);
}

template <bool kAdd, bool kXBias, typename T, typename W>
cudaError_t launch_backward(cudaStream_t stream, const T* x, const W* scale, const float* mean,
                            const float* rstd, const T* dout, const T* dh, T* dx, float* partial,
                            int64_t groups, int64_t rows, int64_t width, int64_t partial_rows,
                            int64_t* used_partial_rows) {
  cudaError_t status = cudaSuccess;
  const bool served =
      rows_are_aligned<T>(width, x, scale, dout, dh, dx) &&
      choose_backward<4>(width / kPackSize<T>, [&](auto strategy, int threads) {
        // As many blocks as keep the memory busy; each loops over tiles of rows.
        using S = decltype(strategy);
        using Team = typename S::Team;
        const auto kernel =
            layer_norm_backward_kernel<Team, S::kPacks, S::kRows, kAdd, kXBias, T, W>;
        const int64_t bytes = TileRing < Team, T, S::kPacks, S::kRows,
                      kAdd ? 3 : 2 > ::bytes(threads);
        const int64_t tiles = divide_up(rows, S::kRows * Team::kRowsPerBlock);
        int64_t blocks = 0;
        status = backward_blocks(kernel, threads, S::kWarps, bytes, groups, tiles, &blocks);
        if (status != cudaSuccess || blocks == 0) return false;
        *used_partial_rows = std::min(blocks, partial_rows);
        const Launch launch{dim3(*used_partial_rows, groups), threads, static_cast<size_t>(bytes)};
        status = launch_kernel(stream, kernel, launch, x, scale, mean, rstd, dout, dh, dx, partial,
                               rows, static_cast<int>(width), partial_rows);
        return true;
      });
  if (served || status != cudaSuccess) return status;
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, layer_norm_backward_any_width_kernel<kAdd, T, W>,
                                       {dim3(any_width_blocks(rows), groups), kAnyWidthThreads}, x,
                                       scale, mean, rstd, dout, dh, dx, rows, width));
  *used_partial_rows = partial_rows;
  const dim3 grid(divide_up(width, kAnyWidthThreads), groups, partial_rows);
  return launch_kernel(stream, layer_norm_backward_columns_kernel<kXBias, T>,
                       {grid, kAnyWidthThreads}, x, mean, rstd, dout, dx, partial, rows, width,
                       partial_rows);
}

}  // namespace

template <typename T, typename W>
cudaError_t LayerNorm<T, W>::forward(cudaStream_t stream, const T* x, const T* residual,
                                     const W* x_bias, const W* scale, const W* bias, float eps,
                                     T* out, T* h, float* mean, float* rstd, int64_t groups,
                                     int64_t rows, int64_t width) {
  if (groups * rows * width == 0) return cudaSuccess;
  const auto launch = residual ? launch_forward<true, T, W> : launch_forward<false, T, W>;
  return launch(stream, x, residual, x_bias, scale, bias, eps, out, h, mean, rstd, groups, rows,
                width);
}

template <typename T, typename W>
cudaError_t LayerNorm<T, W>::backward(cudaStream_t stream, const T* x, const W* scale,
                                      const float* mean, const float* rstd, const T* dout,
                                      const T* dh, T* dx, W* dscale, W* dbias, W* dx_bias,
                                      float* partial, int64_t groups, int64_t rows, int64_t width,
                                      int64_t partial_rows) {
  if (groups * width == 0) return cudaSuccess;
  int64_t used = 0;  // without rows the weights' gradients are sums of nothing
  if (rows > 0) {
    const auto with_dh =
        dx_bias ? launch_backward<true, true, T, W> : launch_backward<true, false, T, W>;
    const auto without =
        dx_bias ? launch_backward<false, true, T, W> : launch_backward<false, false, T, W>;
    const auto launch = dh ? with_dh : without;
    JAXLLM_RETURN_IF_ERROR(launch(stream, x, scale, mean, rstd, dout, dh, dx, partial, groups, rows,
                                  width, partial_rows, &used));
  }
  if (dx_bias) {
    return column_sum(stream, partial, {dscale, dbias, dx_bias}, groups, used, partial_rows, width);
  }
  return column_sum(stream, partial, {dscale, dbias}, groups, used, partial_rows, width);
}

template struct LayerNorm<float, float>;
template struct LayerNorm<__nv_bfloat16, __nv_bfloat16>;
template struct LayerNorm<__nv_bfloat16, float>;
template struct LayerNorm<__half, __half>;
template struct LayerNorm<__half, float>;

}  // namespace jaxllm
