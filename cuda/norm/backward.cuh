// The backward pass of both norms. `Norm` is LayerNormFormula or RmsNormFormula: the kernels only
// hold the loads, the sums over rows and columns, and the stores.
#pragma once

#include <algorithm>

#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "norm/norm.h"
#include "norm/rows.cuh"
#include "norm/strategies.h"

namespace jaxllm {

// The column sums that a backward kernel makes: dscale; dbias; dx where x has a bias.
template <class Norm>
__host__ __device__ constexpr int column_sums(bool has_x_bias) {
  return Norm::kCenters ? 2 + has_x_bias : 1;
}

// Which calls a kernel serves: those where x has no bias, those where it has one, or both.
enum class XBias { kNo, kYes, kEither };

// A persistent kernel: the CTAs loop over tiles of rows. Each thread adds up the weight gradients
// of its columns, and dx where x has a bias, over all its rows. At the end the CTA stores them as
// one partial row.
template <class Norm, class Strategy, bool kAdd, XBias kXBias, typename T, typename W>
__global__ void __launch_bounds__(Strategy::ThreadGroup::kMaxThreads)
    norm_backward_kernel(const T* x, const W* scale, const float* mean, const float* rstd,
                         const T* dout, const T* dh, T* dx, float* partial, int64_t rows, int width,
                         int64_t partial_rows, bool has_x_bias) {
  const bool sums_dx = kXBias == XBias::kEither ? has_x_bias : kXBias == XBias::kYes;
  using ThreadGroup = typename Strategy::ThreadGroup;
  constexpr int kVector = kPackSize<T>, kPacks = Strategy::kPacks, kRows = Strategy::kRows;
  constexpr int kTileRows = kRows * ThreadGroup::kRowsPerCta;
  ThreadGroup threads;
  extern __shared__ int4 smem[];
  TilePipeline<ThreadGroup, T, kPacks, kRows, kAdd ? 3 : 2> pipeline{smem};

  const int64_t first_row = blockIdx.y * rows;
  const float per_column = __fdividef(1.0f, width);
  Pack<W, kVector> scales[kPacks] = {};
  load_weights<false>(threads, scales, scale + int64_t{blockIdx.y} * width, width);
  float dscale[kPacks][kVector] = {}, dbias[kPacks][kVector] = {}, dx_bias[kPacks][kVector] = {};

  const int64_t stride = int64_t{gridDim.x} * kTileRows;
  const auto row_in_tile = [&](int r) { return r * ThreadGroup::kRowsPerCta + threads.row(); };
  RowStatistics next[kRows];
  const auto fetch = [&](int stage, int64_t tile_row) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile_row + row_in_tile(r);
      const bool is_row = row >= 0 && row < rows;
      const int64_t offset = (first_row + row) * width;
      pipeline.fetch(threads, stage, r, {x + offset, dout + offset, dh + offset}, width, is_row);
      const bool has_mean = Norm::kCenters && is_row;
      next[r].mean = has_mean ? load_for_later(mean + first_row + row) : 0.0f;
      next[r].rstd = is_row ? load_for_later(rstd + first_row + row) : 0.0f;
    }
    pipeline.commit();
  };

  // From the last rows on: see cta_from_the_end().
  int64_t tile_row = ((rows - 1) / kTileRows - blockIdx.x) * kTileRows;
  fetch(0, tile_row);
  for (int stage = 0; tile_row >= 0; tile_row -= stride, stage ^= 1) {
    RowStatistics statistics[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) statistics[r] = next[r];
    fetch(stage ^ 1, tile_row - stride);
    pipeline.wait_for_previous();

    float sums[kRows * Norm::kSums] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Pack<T> xs = pipeline.read(stage, r, 0, p), douts = pipeline.read(stage, r, 1, p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          Norm::accumulate(xs[i], douts[i], scales[p][i], statistics[r], &sums[r * Norm::kSums],
                           dscale[p][i], dbias[p][i]);
        }
      }
    }
    threads.sum(sums);
    fence_packs(scales);

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = tile_row + row_in_tile(r);
      if (row >= rows) continue;
      const auto terms = Norm::row_terms(&sums[r * Norm::kSums], statistics[r].rstd, per_column);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = pack_column<T>(threads, p);
        if (column >= width) continue;
        const Pack<T> xs = pipeline.read(stage, r, 0, p), douts = pipeline.read(stage, r, 1, p);
        float result[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          result[i] = Norm::dx(xs[i], douts[i], scales[p][i], statistics[r], terms);
        }
        if constexpr (kAdd) {
          const Pack<T> dhs = pipeline.read(stage, r, 2, p);
#pragma unroll
          for (int i = 0; i < kVector; ++i) result[i] += dhs[i];
        }
        if (sums_dx) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) dx_bias[p][i] += result[i];
        }
        store(dx + (first_row + row) * width + column, Pack<T>::of(result));
      }
    }
    fence_packs(scales);
  }

  partial += (column_sums<Norm>(sums_dx) * blockIdx.y * partial_rows + blockIdx.x) * width;
  store_column_sums<T>(threads, dscale, partial, width);
  if constexpr (Norm::kCenters) {
    store_column_sums<T>(threads, dbias, partial + partial_rows * width, width);
  }
  if (sums_dx) {
    store_column_sums<T>(threads, dx_bias, partial + 2 * partial_rows * width, width);
  }
}

// dx for rows of any width and alignment: a CTA for each row.
template <class Norm, bool kAdd, typename T, typename W>
__global__ void norm_backward_any_width_kernel(NormBackwardParams<T, W> params) {
  CtaPerRow<kAnyWidthThreads> threads;
  const int64_t rows = params.rows, width = params.width;
  const W* const scale = params.scale + blockIdx.y * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t my_row = blockIdx.y * rows + row, offset = my_row * width;
    const float row_mean = Norm::kCenters ? params.mean[my_row] : 0.0f;
    const float row_rstd = params.rstd[my_row];
    float sums[Norm::kSums] = {};  // the last of g * n, the one before of g
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float g = Norm::g(to_float(params.dout[offset + i]), to_float(scale[i]));
      if constexpr (Norm::kCenters) sums[0] += g;
      sums[Norm::kSums - 1] += g * (to_float(params.x[offset + i]) - row_mean) * row_rstd;
    }
    threads.sum(sums);
    const float mean_g = Norm::kCenters ? sums[0] / width : 0.0f;
    const float mean_gn = sums[Norm::kSums - 1] / width;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float n = (to_float(params.x[offset + i]) - row_mean) * row_rstd;
      const float g = Norm::g(to_float(params.dout[offset + i]), to_float(scale[i]));
      float value = row_rstd * (g - mean_g - n * mean_gn);
      if constexpr (kAdd) value += to_float(params.dh[offset + i]);
      params.dx[offset + i] = from_float<T>(value);
    }
  }
}

// The column sums for any width: a thread for each column, a CTA for every gridDim.z-th row.
template <class Norm, typename T>
__global__ void norm_backward_columns_kernel(const T* x, const float* mean, const float* rstd,
                                             const T* dout, const T* dx, float* partial,
                                             int64_t rows, int64_t width, int64_t partial_rows,
                                             bool has_x_bias) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float dscale = 0.0f, dbias = 0.0f, dx_bias = 0.0f;
  for (int64_t row = blockIdx.z; row < rows; row += gridDim.z) {
    const int64_t my_row = blockIdx.y * rows + row, i = my_row * width + column;
    const float row_mean = Norm::kCenters ? mean[my_row] : 0.0f;
    const float d = to_float(dout[i]);
    dscale += d * (to_float(x[i]) - row_mean) * rstd[my_row];
    dbias += d;
    if (has_x_bias) dx_bias += to_float(dx[i]);
  }
  const int64_t sums = column_sums<Norm>(has_x_bias);
  partial += (sums * blockIdx.y * partial_rows + blockIdx.z) * width + column;
  partial[0] = dscale;
  if constexpr (Norm::kCenters) partial[partial_rows * width] = dbias;
  if (has_x_bias) partial[2 * partial_rows * width] = dx_bias;
}

// Stores dx and the first stage of the column sums; *used is the number of partial rows of these.
template <class Norm, bool kAdd, typename T, typename W>
cudaError_t launch_norm_backward(cudaStream_t stream, const NormBackwardParams<T, W>& params,
                                 int64_t* used) {
  const int64_t groups = params.groups, rows = params.rows, width = params.width;
  const bool has_x_bias = Norm::kCenters && params.dx_bias != nullptr;
  if (rows_are_aligned<T>(width, params.x, params.scale, params.dout, params.dh, params.dx)) {
    const int64_t packs = width / kPackSize<T>;
    const cudaError_t status = choose_backward<Norm::kSums>(packs, [&](auto strategy) {
      using S = decltype(strategy);
      using Pipeline = TilePipeline<typename S::ThreadGroup, T, S::kPacks, S::kRows, kAdd ? 3 : 2>;
      // With dh one kernel for both takes up to 2% less time than two, where a thread has registers
      // for the sums of dx. Without dh it takes 4% more for 768 columns, and 18% for 16384.
      constexpr XBias kServed =
          Norm::kCenters && kAdd && S::kPacks < 4 ? XBias::kEither : XBias::kNo;
      auto kernel = norm_backward_kernel<Norm, S, kAdd, kServed, T, W>;
      if constexpr (Norm::kCenters && kServed == XBias::kNo) {
        if (has_x_bias) kernel = norm_backward_kernel<Norm, S, kAdd, XBias::kYes, T, W>;
      }
      const int threads = S::threads(packs);
      const int64_t bytes = Pipeline::bytes(threads);
      const int64_t tiles = divide_up(rows, S::kRows * S::ThreadGroup::kRowsPerCta);
      int64_t ctas = 0;
      JAXLLM_RETURN_IF_ERROR(
          backward_ctas(kernel, threads, S::kWarps, bytes, groups, tiles, &ctas));
      if (ctas == 0) return cudaErrorNotSupported;
      *used = std::min(ctas, params.partial_rows);
      const Launch launch{dim3(*used, groups), threads, static_cast<size_t>(bytes)};
      return launch_kernel(stream, kernel, launch, params.x, params.scale, params.mean, params.rstd,
                           params.dout, params.dh, params.dx, params.partial, rows,
                           static_cast<int>(width), params.partial_rows, has_x_bias);
    });
    if (status != cudaErrorNotSupported) return status;
  }
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, norm_backward_any_width_kernel<Norm, kAdd, T, W>,
                                       {dim3(any_width_ctas(rows), groups), kAnyWidthThreads},
                                       params));
  *used = params.partial_rows;
  const dim3 grid(divide_up(width, kAnyWidthThreads), groups, params.partial_rows);
  return launch_kernel(stream, norm_backward_columns_kernel<Norm, T>, {grid, kAnyWidthThreads},
                       params.x, params.mean, params.rstd, params.dout, params.dx, params.partial,
                       rows, width, params.partial_rows, has_x_bias);
}

template <class Norm, typename T, typename W>
cudaError_t norm_backward(cudaStream_t stream, const NormBackwardParams<T, W>& params) {
  if (params.groups * params.width == 0) return cudaSuccess;
  int64_t used = 0;  // without rows the weight gradients are zero
  if (params.rows > 0) {
    const auto launch = params.dh ? launch_norm_backward<Norm, true, T, W>
                                  : launch_norm_backward<Norm, false, T, W>;
    JAXLLM_RETURN_IF_ERROR(launch(stream, params, &used));
  }
  const auto sum_columns = [&](auto... outputs) {
    return column_sum(stream, params.partial, {outputs...}, params.groups, used,
                      params.partial_rows, params.width);
  };
  if constexpr (Norm::kCenters) {
    return params.dx_bias ? sum_columns(params.dscale, params.dbias, params.dx_bias)
                          : sum_columns(params.dscale, params.dbias);
  } else {
    return sum_columns(params.dscale);
  }
}

}  // namespace jaxllm
