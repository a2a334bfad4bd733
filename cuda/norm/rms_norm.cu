#include <algorithm>

#include "common/column_sum.cuh"
#include "norm/rms_norm.h"
#include "norm/rows.cuh"

namespace jaxllm {
namespace {

// The shape of layer_norm_forward_kernel, with one sum over the row in place of two.
template <class Team, int kPacks, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Team::kMaxThreads)
    rms_norm_forward_kernel(const T* x, const T* residual, const W* scale, float eps, T* out, T* h,
                            float* rstd, int64_t rows, int width) {
  constexpr int kVector = kPackSize<T>;
  const int64_t first_row = blockIdx.y * rows;
  Team team;
  Pack<W, kVector> scales[kPacks];
  load_weights(team, scale + int64_t{blockIdx.y} * width, width, scales);

  const int64_t stride = int64_t{gridDim.x} * Team::kRowsPerBlock;
  int64_t block_row = int64_t{blockIdx.x} * Team::kRowsPerBlock;
  const auto load = [&](const T* array, int64_t row) {
    return load_row<kPacks>(team, array + (first_row + row) * width, width, row < rows);
  };
  int64_t row = block_row + team.row();
  RowShare<T, kPacks> next = load(x, row), next_residual;
  if constexpr (kAdd) next_residual = load(residual, row);

  for (; block_row < rows; block_row += stride, row += stride) {
    RowShare<T, kPacks> current = next;
    next = load(x, row + stride);
    if constexpr (kAdd) {
      add_and_store(team, current, next_residual, h + (first_row + row) * width, width, row < rows);
      next_residual = load(residual, row + stride);
    }

    float squares[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) squares[0] += current(p, i) * current(p, i);
    }
    team.sum(squares);
    const float row_rstd = rsqrtf(squares[0] / width + eps);

    if (row >= rows) continue;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (team.thread() + p * team.threads()) * kVector;
      if (column >= width) continue;
      Pack<T, kVector> result;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        result.values[i] = from_float<T>(current(p, i) * row_rstd * to_float(scales[p].values[i]));
      }
      store(out + (first_row + row) * width + column, result);
    }
    if (team.thread() == 0) rstd[first_row + row] = row_rstd;
  }
}

// Rows of any width and alignment: a block a row, one element at a time, read from memory (the
// cache, as a rule) for each of the two passes.
template <bool kAdd, typename T, typename W>
__global__ void rms_norm_forward_any_width_kernel(const T* x, const T* residual, const W* scale,
                                                  float eps, T* out, T* h, float* rstd,
                                                  int64_t rows, int64_t width) {
  BlockPerRow team;
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
    if (threadIdx.x == 0) rstd[blockIdx.y * rows + row] = row_rstd;
  }
}

// As the forward, and beside dx each thread adds up the weight gradient of its columns over all
// rows that its block visits; the block writes them as one partial row.
template <class Team, int kPacks, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Team::kMaxThreads)
    rms_norm_backward_kernel(const T* x, const W* scale, const float* rstd, const T* dout,
                             const T* dh, T* dx, float* partial, int64_t rows, int width,
                             int64_t partial_rows) {
  constexpr int kVector = kPackSize<T>;
  const int64_t first_row = blockIdx.y * rows;
  Team team;
  Pack<W, kVector> scales[kPacks];
  load_weights(team, scale + int64_t{blockIdx.y} * width, width, scales);
  float dscale[kPacks][kVector] = {};

  const int64_t stride = int64_t{gridDim.x} * Team::kRowsPerBlock;
  int64_t block_row = int64_t{blockIdx.x} * Team::kRowsPerBlock;
  const auto load = [&](const T* array, int64_t row) {
    return load_row<kPacks>(team, array + (first_row + row) * width, width, row < rows);
  };
  const auto statistic = [&](const float* array, int64_t row) {
    return row < rows ? array[first_row + row] : 0.0f;
  };
  int64_t row = block_row + team.row();
  RowShare<T, kPacks> next_x = load(x, row), next_dout = load(dout, row), next_dh;
  if constexpr (kAdd) next_dh = load(dh, row);
  float next_rstd = statistic(rstd, row);

  for (; block_row < rows; block_row += stride, row += stride) {
    const RowShare<T, kPacks> row_x = next_x, row_dout = next_dout, row_dh = next_dh;
    const float row_rstd = next_rstd;
    next_x = load(x, row + stride);
    next_dout = load(dout, row + stride);
    if constexpr (kAdd) next_dh = load(dh, row + stride);
    next_rstd = statistic(rstd, row + stride);

    float sum_gn[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float dn = row_dout(p, i) * row_x(p, i) * row_rstd;
        sum_gn[0] += dn * to_float(scales[p].values[i]);
        dscale[p][i] += dn;
      }
    }
    team.sum(sum_gn);
    const float mean_gn = sum_gn[0] / width;

    if (row >= rows) continue;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (team.thread() + p * team.threads()) * kVector;
      if (column >= width) continue;
      Pack<T, kVector> result;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float g = row_dout(p, i) * to_float(scales[p].values[i]);
        float value = row_rstd * (g - row_x(p, i) * row_rstd * mean_gn);
        if constexpr (kAdd) value += row_dh(p, i);
        result.values[i] = from_float<T>(value);
      }
      store(dx + (first_row + row) * width + column, result);
    }
  }

  store_column_sums(team, dscale, partial + (blockIdx.y * partial_rows + blockIdx.x) * width,
                    width);
}

// dx for rows of any width and alignment, a block a row.
template <bool kAdd, typename T, typename W>
__global__ void rms_norm_backward_any_width_kernel(const T* x, const W* scale, const float* rstd,
                                                   const T* dout, const T* dh, T* dx, int64_t rows,
                                                   int64_t width) {
  BlockPerRow team;
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
  if (!fits_registers<T>(width, x, residual, scale, out, h)) {
    const dim3 grid(any_width_blocks(rows), groups);
    rms_norm_forward_any_width_kernel<kAdd>
        <<<grid, kAnyWidthThreads, 0, stream>>>(x, residual, scale, eps, out, h, rstd, rows, width);
    return cudaGetLastError();
  }
  return launch_by_width(width, [&](auto strategy, int threads) {
    using Strategy = decltype(strategy);
    constexpr int kPacks = Strategy::kElementsPerThread / kPackSize<T>;
    const auto kernel = rms_norm_forward_kernel<typename Strategy::Team, kPacks, kAdd, T, W>;
    int64_t blocks = 0;
    JAXLLM_RETURN_IF_ERROR(
        row_blocks<typename Strategy::Team>(kernel, threads, groups, rows, &blocks));
    kernel<<<dim3(blocks, groups), threads, 0, stream>>>(x, residual, scale, eps, out, h, rstd,
                                                         rows, width);
    return cudaGetLastError();
  });
}

template <bool kAdd, typename T, typename W>
cudaError_t launch_backward(cudaStream_t stream, const T* x, const W* scale, const float* rstd,
                            const T* dout, const T* dh, T* dx, float* partial, int64_t groups,
                            int64_t rows, int64_t width, int64_t partial_rows,
                            int64_t* used_partial_rows) {
  if (!fits_registers<T>(width, x, scale, dout, dh, dx)) {
    rms_norm_backward_any_width_kernel<kAdd>
        <<<dim3(any_width_blocks(rows), groups), kAnyWidthThreads, 0, stream>>>(
            x, scale, rstd, dout, dh, dx, rows, width);
    JAXLLM_RETURN_IF_ERROR(cudaGetLastError());
    *used_partial_rows = partial_rows;
    const dim3 grid(divide_up(width, kAnyWidthThreads), groups, partial_rows);
    rms_norm_backward_columns_kernel<<<grid, kAnyWidthThreads, 0, stream>>>(
        x, rstd, dout, partial, rows, width, partial_rows);
    return cudaGetLastError();
  }
  return launch_by_width(width, [&](auto strategy, int threads) {
    using Strategy = decltype(strategy);
    constexpr int kPacks = Strategy::kElementsPerThread / kPackSize<T>;
    const auto kernel = rms_norm_backward_kernel<typename Strategy::Team, kPacks, kAdd, T, W>;
    int64_t blocks = 0;
    JAXLLM_RETURN_IF_ERROR(
        row_blocks<typename Strategy::Team>(kernel, threads, groups, rows, &blocks));
    *used_partial_rows = std::min(blocks, partial_rows);
    kernel<<<dim3(*used_partial_rows, groups), threads, 0, stream>>>(
        x, scale, rstd, dout, dh, dx, partial, rows, width, partial_rows);
    return cudaGetLastError();
  });
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
  W* const no_second = nullptr;
  return column_sum(stream, partial, dscale, no_second, groups, used, partial_rows, width);
}

template struct RmsNorm<float, float>;
template struct RmsNorm<__nv_bfloat16, __nv_bfloat16>;
template struct RmsNorm<__nv_bfloat16, float>;
template struct RmsNorm<__half, __half>;
template struct RmsNorm<__half, float>;

}  // namespace jaxllm
