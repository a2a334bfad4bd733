#include <algorithm>

#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "norm/forward_rows.cuh"
#include "norm/rms_norm.h"
#include "norm/rows.cuh"
#include "norm/strategies.h"

namespace jaxllm {
namespace {

// The shape of layer_norm_forward_kernel, with one sum over the row in place of two.
template <class Strategy, bool kExact, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Strategy::Team::kMaxThreads, Strategy::kMinBlocks)
    rms_norm_forward_kernel(const T* x, const T* residual, const W* scale, float eps, T* out, T* h,
                            float* rstd, int64_t rows, int width) {
  constexpr int kVector = kPackSize<T>, kPacks = Strategy::kPacks;
  constexpr bool kStreams = Strategy::kStreams;
  // Registers that hold a row of T have no room for weights of more bytes.
  constexpr bool kWeightsFirst =
      Strategy::kWeightsFirst || (Strategy::kBulk && sizeof(W) <= sizeof(T));
  typename Strategy::Team team;
  const int64_t first_row = block_from_the_end() * team.kRowsPerBlock;  // of the group
  // Lanes beyond the last row only meet in the sum.
  const bool is_row = team.kRowsPerBlock == 1 || first_row + team.row() < rows;
  const int64_t row = blockIdx.y * rows + first_row + team.row();
  ForwardRows<Strategy::kBulk, kAdd, T> memory(
      team, x, residual, h, out, blockIdx.y * rows + first_row, rows - first_row, width);
  scale += int64_t{blockIdx.y} * width;
  const float per_column = __fdividef(1.0f, width);

  Pack<W, kVector> scales[kPacks] = {};
  if constexpr (kWeightsFirst) load_weights<kExact>(team, scales, scale, width);
  memory.wait();
  Pack<T> packs[kPacks] = {};
  load_row<kExact, kStreams>(team, packs, memory.x, width, is_row);
  if constexpr (kAdd) {
    const W* const no_bias = nullptr;
    add_and_store<kExact, kStreams>(team, packs, memory.residual, no_bias, memory.h, width, is_row);
  }

  float values[kPacks][kVector];
  float squares[1] = {0.0f};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float of_pack = 0.0f;  // a sum of its own: the packs' additions need not wait for each other
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[p][i] = packs[p][i];
      of_pack += values[p][i] * values[p][i];
    }
    squares[0] += of_pack;
  }
  team.sum(squares);
  const float row_rstd = rsqrtf(squares[0] * per_column + eps);

  if (!is_row) return;
  if (rstd && team.thread() == 0) store_statistic(rstd + row, row_rstd);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(team, p);
    if (!kExact && column >= width) continue;
    if constexpr (!kWeightsFirst) scales[p] = load_cached<kVector>(scale + column);

    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[i] = values[p][i] * row_rstd * scales[p][i];
    store_pack<kStreams>(Pack<T>::of(result), memory.out + column);
  }
  memory.finish();
}

// Rows of any width and alignment: a block a row, one element at a time, read from memory (the
// cache, as a rule) for each of the two passes.
template <bool kAdd, typename T, typename W>
__global__ void rms_norm_forward_any_width_kernel(const T* x, const T* residual, const W* scale,
                                                  float eps, T* out, T* h, float* rstd,
                                                  int64_t rows, int64_t width) {
  BlockPerRow<kAnyWidthThreads> team;
  scale += blockIdx.y * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t offset = (blockIdx.y * rows + row) * width;
    const T* source = kAdd ? h + offset : x + offset;
    float squares[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      if constexpr (kAdd) {
        h[offset + i] = from_float<T>(to_float(x[offset + i]) + to_float(residual[offset + i]));
      }
      squares[0] += to_float(source[i]) * to_float(source[i]);
    }
    team.sum(squares);
    const float row_rstd = rsqrtf(squares[0] / width + eps);
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      out[offset + i] = from_float<T>(to_float(source[i]) * row_rstd * to_float(scale[i]));
    }
    if (rstd && threadIdx.x == 0) rstd[blockIdx.y * rows + row] = row_rstd;
  }
}

// The shape of layer_norm_backward_kernel, with one sum over the row and one weight's gradient.
template <class Team, int kPacks, int kRows, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Team::kMaxThreads)
    rms_norm_backward_kernel(const T* x, const W* scale, const float* rstd, const T* dout,
                             const T* dh, T* dx, float* partial, int64_t rows, int width,
                             int64_t partial_rows) {
  constexpr int kVector = kPackSize<T>;
  constexpr int kTileRows = kRows * Team::kRowsPerBlock;
  Team team;
  extern __shared__ int4 shared_memory[];
  TileRing<Team, T, kPacks, kRows, kAdd ? 3 : 2> ring{shared_memory};

  const int64_t first_row = blockIdx.y * rows;
  const float per_column = __fdividef(1.0f, width);
  Pack<W, kVector> scales[kPacks] = {};
  load_weights<false>(team, scales, scale + int64_t{blockIdx.y} * width, width);
  float dscale[kPacks][kVector] = {};

  const int64_t stride = int64_t{gridDim.x} * kTileRows;
  const auto row_in_tile = [&](int r) { return r * Team::kRowsPerBlock + team.row(); };
  float next_rstd[kRows];
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
      next_rstd[r] = is_row ? load_for_later(rstd + first_row + row) : 0.0f;
    }
    ring.commit();
  };

  // From the last rows on: see rows.cuh.
  int64_t tile_row = ((rows - 1) / kTileRows - blockIdx.x) * kTileRows;
  fetch(0, tile_row);
  for (int tile = 0; tile_row >= 0; tile_row -= stride, tile ^= 1) {
    float row_rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_rstd[r] = next_rstd[r];
    fetch(tile ^ 1, tile_row - stride);
    ring.wait_for_previous();

    float sums[kRows] = {};  // of g * n
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Pack<T> xs = ring.read(tile, r, 0, p), douts = ring.read(tile, r, 1, p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float dn = douts[i] * (xs[i] * row_rstd[r]);
          sums[r] += dn * scales[p][i];
          dscale[p][i] += dn;
        }
      }
    }
    team.sum(sums);
    forget_unpacked(scales);

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile_row + row_in_tile(r);
      if (row >= rows) continue;
      // dx = rstd * (g - n * mean(g * n)), and n * mean(g * n) = x * of_x.
      const float of_x = row_rstd[r] * sums[r] * per_column;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = pack_column<T>(team, p);
        if (column >= width) continue;
        const Pack<T> xs = ring.read(tile, r, 0, p), douts = ring.read(tile, r, 1, p);
        float result[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          result[i] = row_rstd[r] * (douts[i] * scales[p][i] - xs[i] * of_x);
        }
        if constexpr (kAdd) {
          const Pack<T> dhs = ring.read(tile, r, 2, p);
#pragma unroll
          for (int i = 0; i < kVector; ++i) result[i] += dhs[i];
        }
        store(dx + (first_row + row) * width + column, Pack<T>::of(result));
      }
    }
    forget_unpacked(scales);
  }

  store_column_sums<T>(team, dscale, partial + (blockIdx.y * partial_rows + blockIdx.x) * width,
                       width);
}

// dx for rows of any width and alignment, a block a row.
template <bool kAdd, typename T, typename W>
__global__ void rms_norm_backward_any_width_kernel(const T* x, const W* scale, const float* rstd,
                                                   const T* dout, const T* dh, T* dx, int64_t rows,
                                                   int64_t width) {
  BlockPerRow<kAnyWidthThreads> team;
  scale += blockIdx.y * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float row_rstd = rstd[blockIdx.y * rows + row];
    const int64_t offset = (blockIdx.y * rows + row) * width;
    float sum_gn[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      sum_gn[0] +=
          to_float(dout[offset + i]) * to_float(scale[i]) * to_float(x[offset + i]) * row_rstd;
    }
    team.sum(sum_gn);
    const float mean_gn = sum_gn[0] / width;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float g = to_float(dout[offset + i]) * to_float(scale[i]);
      float value = row_rstd * (g - to_float(x[offset + i]) * row_rstd * mean_gn);
      if constexpr (kAdd) value += to_float(dh[offset + i]);
      dx[offset + i] = from_float<T>(value);
    }
  }
}

// dscale for any width: a thread a column, a block for every gridDim.z-th row.
template <typename T>
__global__ void rms_norm_backward_columns_kernel(const T* x, const float* rstd, const T* dout,
                                                 float* partial, int64_t rows, int64_t width,
                                                 int64_t partial_rows) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float dscale = 0.0f;
  for (int64_t row = blockIdx.z; row < rows; row += gridDim.z) {
    const int64_t my_row = blockIdx.y * rows + row;
    const int64_t i = my_row * width + column;
    dscale += to_float(dout[i]) * to_float(x[i]) * rstd[my_row];
  }
  partial[(blockIdx.y * partial_rows + blockIdx.z) * width + column] = dscale;
}

template <bool kAdd, typename T, typename W>
cudaError_t launch_forward(cudaStream_t stream, const T* x, const T* residual, const W* scale,
                           float eps, T* out, T* h, float* rstd, int64_t groups, int64_t rows,
                           int64_t width) {
  // A team for each row of each group.
  const auto launch = [&](auto strategy, int threads) {
    using S = decltype(strategy);
    const dim3 grid(divide_up(rows, S::Team::kRowsPerBlock), groups);
    const bool exact = width == int64_t{S::kPacks} * S::threads_per_row(threads) * kPackSize<T>;
    const auto kernel = exact ? rms_norm_forward_kernel<S, true, kAdd, T, W>
                              : rms_norm_forward_kernel<S, false, kAdd, T, W>;
    const int64_t bytes =
        ForwardRows<S::kBulk, kAdd, T>::shared_bytes(S::Team::kRowsPerBlock, width);
    return launch_kernel(stream, kernel, {grid, threads, static_cast<size_t>(bytes)}, x, residual,
                         scale, eps, out, h, rstd, rows, static_cast<int>(width));
  };
  cudaError_t status = cudaSuccess;
  const bool served =
      rows_are_aligned<T>(width, x, residual, scale, out, h) &&
      choose_forward<1, kAdd>(width / kPackSize<T>, [&](auto strategy, int threads) {
        using S = decltype(strategy);
        if constexpr (S::kBulk) {
          KernelImage image;
          status = image.read(rms_norm_forward_kernel<S, true, kAdd, T, W>);
          if (status != cudaSuccess) return true;
          if (!image.has_bulk_copies()) {
            status = launch(typename S::Plain{}, threads);
            return true;
          }
        }
        status = launch(strategy, threads);
        return true;
      });
  if (served) return status;
  return launch_kernel(stream, rms_norm_forward_any_width_kernel<kAdd, T, W>,
                       {dim3(any_width_blocks(rows), groups), kAnyWidthThreads}, x, residual, scale,
                       eps, out, h, rstd, rows, width);
}

template <bool kAdd, typename T, typename W>
cudaError_t launch_backward(cudaStream_t stream, const T* x, const W* scale, const float* rstd,
                            const T* dout, const T* dh, T* dx, float* partial, int64_t groups,
                            int64_t rows, int64_t width, int64_t partial_rows,
                            int64_t* used_partial_rows) {
  cudaError_t status = cudaSuccess;
  const bool served =
      rows_are_aligned<T>(width, x, scale, dout, dh, dx) &&
      choose_backward<2>(width / kPackSize<T>, [&](auto strategy, int threads) {
        // As many blocks as keep the memory busy; each loops over tiles of rows.
        using S = decltype(strategy);
        using Team = typename S::Team;
        const auto kernel = rms_norm_backward_kernel<Team, S::kPacks, S::kRows, kAdd, T, W>;
        const int64_t bytes = TileRing < Team, T, S::kPacks, S::kRows,
                      kAdd ? 3 : 2 > ::bytes(threads);
        const int64_t tiles = divide_up(rows, S::kRows * Team::kRowsPerBlock);
        int64_t blocks = 0;
        status = backward_blocks(kernel, threads, S::kWarps, bytes, groups, tiles, &blocks);
        if (status != cudaSuccess || blocks == 0) return false;
        *used_partial_rows = std::min(blocks, partial_rows);
        const Launch launch{dim3(*used_partial_rows, groups), threads, static_cast<size_t>(bytes)};
        status = launch_kernel(stream, kernel, launch, x, scale, rstd, dout, dh, dx, partial, rows,
                               static_cast<int>(width), partial_rows);
        return true;
      });
  if (served || status != cudaSuccess) return status;
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, rms_norm_backward_any_width_kernel<kAdd, T, W>,
                                       {dim3(any_width_blocks(rows), groups), kAnyWidthThreads}, x,
                                       scale, rstd, dout, dh, dx, rows, width));
  *used_partial_rows = partial_rows;
  const dim3 grid(divide_up(width, kAnyWidthThreads), groups, partial_rows);
  return launch_kernel(stream, rms_norm_backward_columns_kernel<T>, {grid, kAnyWidthThreads}, x,
                       rstd, dout, partial, rows, width, partial_rows);
}

}  // namespace

template <typename T, typename W>
cudaError_t RmsNorm<T, W>::forward(cudaStream_t stream, const T* x, const T* residual,
                                   const W* scale, float eps, T* out, T* h, float* rstd,
                                   int64_t groups, int64_t rows, int64_t width) {
  if (groups * rows * width == 0) return cudaSuccess;
  const auto launch = residual ? launch_forward<true, T, W> : launch_forward<false, T, W>;
  return launch(stream, x, residual, scale, eps, out, h, rstd, groups, rows, width);
}

template <typename T, typename W>
cudaError_t RmsNorm<T, W>::backward(cudaStream_t stream, const T* x, const W* scale,
                                    const float* rstd, const T* dout, const T* dh, T* dx, W* dscale,
                                    float* partial, int64_t groups, int64_t rows, int64_t width,
                                    int64_t partial_rows) {
  if (groups * width == 0) return cudaSuccess;
  int64_t used = 0;  // without rows the weight's gradient is a sum of nothing
  if (rows > 0) {
    const auto launch = dh ? launch_backward<true, T, W> : launch_backward<false, T, W>;
    JAXLLM_RETURN_IF_ERROR(launch(stream, x, scale, rstd, dout, dh, dx, partial, groups, rows,
                                  width, partial_rows, &used));
  }
  return column_sum(stream, partial, {dscale}, groups, used, partial_rows, width);
}

template struct RmsNorm<float, float>;
template struct RmsNorm<__nv_bfloat16, __nv_bfloat16>;
template struct RmsNorm<__nv_bfloat16, float>;
template struct RmsNorm<__half, __half>;
template struct RmsNorm<__half, float>;

}  // namespace jaxllm
