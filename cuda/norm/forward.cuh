// The forward pass of both norms. `Norm` is LayerNormFormula or RmsNormFormula: the kernels only
// hold the loads, the sums over a row and the stores.
#pragma once

#include "common/dependent_launch.cuh"
#include "norm/forward_rows.cuh"
#include "norm/norm.h"
#include "norm/rows.cuh"
#include "norm/strategies.h"

namespace jaxllm {

// The sum of `term(value)` over the values of a row. The thread's packs have separate sums, so that
// the additions of one do not wait for those of another.
template <class ThreadGroup, int kPacks, int kVector, class Term>
__device__ __forceinline__ float sum_over_row(ThreadGroup& threads,
                                              const float (&values)[kPacks][kVector], Term term) {
  float sum[1] = {0.0f};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float of_pack = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) of_pack += term(values[p][i]);
    sum[0] += of_pack;
  }
  threads.sum(sum);
  return sum[0];
}

// A thread group holds a row in registers, so that the row is loaded once for all sums.
//
// The parameters are those of NormForwardParams one by one: with the struct the compiler needs more
// registers, here and in the backward kernel, and some variants lose a CTA on an SM.
template <class Norm, class Strategy, bool kExact, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Strategy::ThreadGroup::kMaxThreads, Strategy::kMinCtas)
    norm_forward_kernel(const T* x, const T* residual, const W* x_bias, const W* scale,
                        const W* bias, float eps, T* out, T* h, float* mean, float* rstd,
                        int64_t rows, int width) {
  constexpr int kVector = kPackSize<T>, kPacks = Strategy::kPacks;
  constexpr bool kStreaming = Strategy::kStreaming;
  // With bulk copies the registers do not suffice for a row of T and weights of more bytes.
  constexpr bool kWeightsFirst =
      Strategy::kWeightsFirst || (Strategy::kBulk && sizeof(W) <= sizeof(T));
  typename Strategy::ThreadGroup threads;
  const int64_t first_row = cta_from_the_end() * threads.kRowsPerCta;  // of the group
  // Lanes beyond the last row only take part in the sums.
  const bool is_row = threads.kRowsPerCta == 1 || first_row + threads.row() < rows;
  const int64_t row = blockIdx.y * rows + first_row + threads.row();
  ForwardRows<Strategy::kBulk, kAdd, T> memory(
      threads, x, residual, h, out, blockIdx.y * rows + first_row, rows - first_row, width);
  scale += int64_t{blockIdx.y} * width;
  bias += int64_t{blockIdx.y} * width;
  const float per_column = __fdividef(1.0f, width);

  Pack<W, kVector> scales[kPacks] = {}, biases[kPacks] = {};
  const auto load_all_weights = [&] {
    load_weights<kExact>(threads, scales, scale, width);
    if constexpr (Norm::kCenters) load_weights<kExact>(threads, biases, bias, width);
  };
  // Two weights before the row cost 15 instructions more than after it.
  if constexpr (kWeightsFirst && !Norm::kCenters) load_all_weights();
  memory.wait();
  Pack<T> packs[kPacks] = {};
  load_row<kExact, kStreaming>(threads, packs, memory.x, width, is_row);
  if constexpr (kAdd) {
    if constexpr (!Norm::kCenters) x_bias = nullptr;
    if (x_bias) x_bias += int64_t{blockIdx.y} * width;
    add_and_store<kExact, kStreaming>(threads, packs, memory.residual, x_bias, memory.h, width,
                                      is_row);
  }
  if constexpr (kWeightsFirst && Norm::kCenters) load_all_weights();

  float values[kPacks][kVector];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[p][i] = packs[p][i];
  }
  float row_mean = 0.0f;
  if constexpr (Norm::kCenters) {
    row_mean = sum_over_row(threads, values, [](float x) { return x; }) * per_column;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const bool is_inside = kExact || pack_column<T>(threads, p) < width;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[p][i] = is_inside ? values[p][i] - row_mean : 0.0f;
      }
    }
  }
  const float squares = sum_over_row(threads, values, [](float c) { return c * c; });
  const float row_rstd = rsqrtf(squares * per_column + eps);

  if (!is_row) return;
  if (rstd && threads.rank() == 0) {
    if constexpr (Norm::kCenters) store_statistic(mean + row, row_mean);
    store_statistic(rstd + row, row_rstd);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(threads, p);
    if (!kExact && column >= width) continue;
    if constexpr (!kWeightsFirst) {
      scales[p] = load_cached<kVector>(scale + column);
      if constexpr (Norm::kCenters) biases[p] = load_cached<kVector>(bias + column);
    }
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      result[i] = Norm::out(values[p][i], row_rstd, scales[p][i], biases[p][i]);
    }
    store_pack<kStreaming>(Pack<T>::of(result), memory.out + column);
  }
  memory.store();
}

// Rows of any width and alignment: a CTA for each row, an element at a time, loaded from memory (as
// a rule the cache) in each pass.
template <class Norm, bool kAdd, typename T, typename W>
__global__ void norm_forward_any_width_kernel(NormForwardParams<T, W> params) {
  CtaPerRow<kAnyWidthThreads> threads;
  const int64_t rows = params.rows, width = params.width, first_weight = blockIdx.y * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t offset = (blockIdx.y * rows + row) * width;
    const T* const source = (kAdd ? params.h : params.x) + offset;
    // An element in the first pass, which also adds the residual.
    const auto load_first = [&](int64_t i) {
      if constexpr (kAdd) {
        float branch = to_float(params.x[offset + i]);
        if constexpr (Norm::kCenters) {
          branch += params.x_bias ? to_float(params.x_bias[first_weight + i]) : 0.0f;
        }
        params.h[offset + i] = from_float<T>(branch + to_float(params.residual[offset + i]));
      }
      return to_float(source[i]);
    };
    const auto sum_over_row = [&](auto term) {
      float sum[1] = {0.0f};
      for (int64_t i = threadIdx.x; i < width; i += blockDim.x) sum[0] += term(i);
      threads.sum(sum);
      return sum[0];
    };

    const float row_mean = Norm::kCenters ? sum_over_row(load_first) / width : 0.0f;
    const float squares = sum_over_row([&](int64_t i) {
      const float c = (Norm::kCenters ? to_float(source[i]) : load_first(i)) - row_mean;
      return c * c;
    });
    const float row_rstd = rsqrtf(squares / width + params.eps);

    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const float scale = to_float(params.scale[first_weight + i]);
      const float bias = Norm::kCenters ? to_float(params.bias[first_weight + i]) : 0.0f;
      params.out[offset + i] =
          from_float<T>(Norm::out(to_float(source[i]) - row_mean, row_rstd, scale, bias));
    }
    if (params.rstd && threadIdx.x == 0) {
      if constexpr (Norm::kCenters) params.mean[blockIdx.y * rows + row] = row_mean;
      params.rstd[blockIdx.y * rows + row] = row_rstd;
    }
  }
}

template <class Norm, bool kAdd, typename T, typename W>
cudaError_t launch_norm_forward(cudaStream_t stream, const NormForwardParams<T, W>& params) {
  const int64_t groups = params.groups, rows = params.rows, width = params.width;
  const int64_t packs = width / kPackSize<T>;
  // A thread group for each row of each group.
  const auto launch = [&](auto strategy) {
    using S = decltype(strategy);
    constexpr int kCtaRows = S::ThreadGroup::kRowsPerCta;
    const int threads = S::threads(packs);
    const bool exact = packs == int64_t{S::kPacks} * (threads / kCtaRows);
    const auto kernel = exact ? norm_forward_kernel<Norm, S, true, kAdd, T, W>
                              : norm_forward_kernel<Norm, S, false, kAdd, T, W>;
    const size_t bytes = ForwardRows<S::kBulk, kAdd, T>::shared_bytes(kCtaRows, width);
    const Launch launch{dim3(divide_up(rows, kCtaRows), groups), threads, bytes};
    return launch_kernel(stream, kernel, launch, params.x, params.residual, params.x_bias,
                         params.scale, params.bias, params.eps, params.out, params.h, params.mean,
                         params.rstd, rows, static_cast<int>(width));
  };
  if (rows_are_aligned<T>(width, params.x, params.residual, params.x_bias, params.scale,
                          params.bias, params.out, params.h)) {
    const cudaError_t status = choose_forward<Norm::kSums, kAdd>(packs, [&](auto strategy) {
      using S = decltype(strategy);
      if constexpr (S::kBulk) {
        KernelImage image;
        JAXLLM_RETURN_IF_ERROR(image.read(norm_forward_kernel<Norm, S, true, kAdd, T, W>));
        if (!image.has_bulk_copies()) return launch(typename S::Plain{});
      }
      return launch(strategy);
    });
    if (status != cudaErrorNotSupported) return status;
  }
  return launch_kernel(stream, norm_forward_any_width_kernel<Norm, kAdd, T, W>,
                       {dim3(any_width_ctas(rows), groups), kAnyWidthThreads}, params);
}

template <class Norm, typename T, typename W>
cudaError_t norm_forward(cudaStream_t stream, const NormForwardParams<T, W>& params) {
  if (params.groups * params.rows * params.width == 0) return cudaSuccess;
  return params.residual ? launch_norm_forward<Norm, true>(stream, params)
                         : launch_norm_forward<Norm, false>(stream, params);
}

}  // namespace jaxllm
