#include "common/column_sum.cuh"
#include "gemm/hopper/epilogue_bias.cuh"
#include "gemm/hopper/epilogue_delta.cuh"
#include "gemm/hopper/epilogue_dgelu.cuh"
#include "gemm/hopper/epilogue_float32.cuh"
#include "gemm/hopper/epilogue_gelu.cuh"
#include "gemm/hopper/epilogue_norm_backward.cuh"
#include "gemm/hopper/epilogue_residual.cuh"
#include "gemm/hopper/epilogue_residual_norm.cuh"
#include "gemm/hopper/epilogue_softmax.cuh"
#include "gemm/hopper/kernel.cuh"
#include "gemm/hopper/matmul_hopper.h"

namespace jaxllm {
namespace {

using namespace hopper;

// The widest tiles whose accumulators leave registers to work with: the wider, the less copying.
using GeluTile = GemmTile<192, 4, 1, 2>;
using Tile192 = GemmTile<192, 4, 2, 1>;
// Where tiles of 192 columns would leave SMs idle.
using Tile128 = GemmTile<128, 5, 2, 1>;

// A is (rows, depth). B is (columns, depth), as a weight is for its dgrad, or (depth, columns).
template <class Tile, typename T, template <class> class Scheduler,
          template <class, typename> class Epilogue>
using ForwardGemm = Gemm<Mainloop<Tile, T, Major::kK, Major::kMN>, Scheduler, Epilogue>;
template <class Tile, typename T, template <class> class Scheduler,
          template <class, typename> class Epilogue>
using DgradGemm = Gemm<Mainloop<Tile, T, Major::kK, Major::kK>, Scheduler, Epilogue>;

template <typename T>
using ResidualNormGemm = ForwardGemm<Tile192, T, RowAtOnceScheduler, EpilogueResidualNorm>;
template <typename T>
using NormBackwardGemm = DgradGemm<Tile192, T, RowAtOnceScheduler, EpilogueNormBackward>;

template <class Tile, template <class, typename> class Epilogue, typename T>
cudaError_t launch_any_layout(cudaStream_t stream, const MatmulCall<T>& call,
                              const typename Epilogue<Tile, T>::Arguments& arguments) {
  const auto launch = [&](auto a, auto b) {
    using Loop = Mainloop<Tile, T, a, b>;
    return launch_gemm<Gemm<Loop, PersistentScheduler, Epilogue>>(
        stream, {call.rows, call.columns, call.depth}, call.a, call.b, arguments);
  };
  constexpr std::integral_constant<Major, Major::kK> k;
  constexpr std::integral_constant<Major, Major::kMN> mn;
  if (call.transpose_a) return call.transpose_b ? launch(mn, k) : launch(mn, mn);
  return call.transpose_b ? launch(k, k) : launch(k, mn);
}

cudaError_t fill_sentinel(cudaStream_t stream, float* row_sums, int64_t count) {
  return cudaMemsetAsync(row_sums, kRowSumSentinel & 0xff, count * sizeof(float), stream);
}

// The time that tiles of a shape take: the waves of tiles on the GPU, times the columns of each.
template <class Tile>
int64_t time_of(int64_t rows, int64_t columns, int sms) {
  const int64_t tiles = divide_up(rows, Tile::kBlockM) * divide_up(columns, Tile::kBlockN);
  return divide_up(tiles, sms) * Tile::kBlockN;
}

}  // namespace

template <typename T>
cudaError_t MatmulHopper<T>::matmul(cudaStream_t stream, const MatmulCall<T>& call) {
  const auto is_aligned = [](const void* pointer, int bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
  };
  // Pairs of biases, and of float32 results, are loaded and stored at once.
  if (call.columns % 2 != 0 || !is_aligned(call.bias, 4)) return cudaErrorNotSupported;
  if (call.float32_out) {
    if (call.gelu || !is_aligned(call.out, 8)) return cudaErrorNotSupported;
    return launch_any_layout<Tile128, EpilogueFloat32>(stream, call,
                                                       {static_cast<float*>(call.out), call.bias});
  }
  T* const out = static_cast<T*>(call.out);
  if (call.gelu) {
    return launch_any_layout<Tile192, EpilogueGelu>(stream, call,
                                                    {out, static_cast<T*>(call.h), call.bias});
  }
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  // A tile of 128 columns takes a few hundredths longer than its share of one of 192.
  const int64_t time_192 = time_of<Tile192>(call.rows, call.columns, limits.sms);
  const int64_t time_128 = time_of<Tile128>(call.rows, call.columns, limits.sms);
  return 33 * time_128 < 32 * time_192
             ? launch_any_layout<Tile128, EpilogueBias>(stream, call, {out, call.bias})
             : launch_any_layout<Tile192, EpilogueBias>(stream, call, {out, call.bias});
}

template <typename T>
cudaError_t MatmulHopper<T>::bias_gelu(cudaStream_t stream, const T* x, const T* weight,
                                       const T* bias, bool save_dgelu, T* saved, T* out,
                                       const GemmShape& shape) {
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  if (save_dgelu) {
    return launch_gemm<ForwardGemm<GeluTile, T, PersistentScheduler, EpilogueGeluDgelu>>(
        stream, shape, x, weight, {out, saved, bias});
  }
  return launch_gemm<ForwardGemm<GeluTile, T, PersistentScheduler, EpilogueGelu>>(
      stream, shape, x, weight, {out, saved, bias});
}

template <typename T>
int64_t MatmulHopper<T>::dgelu_elements(const GemmShape& shape) {
  return DgeluOrder<GeluTile>::elements(shape);
}

template <typename T>
cudaError_t MatmulHopper<T>::dgelu(cudaStream_t stream, const T* x, const T* weight, const T* dgelu,
                                   T* out, T* sums, float* partial, const GemmShape& shape) {
  static_assert(kDgeluRows == GeluTile::kBlockM);
  if (shape.columns == 0) return cudaSuccess;
  if (shape.rows > 0) {
    JAXLLM_RETURN_IF_ERROR((launch_gemm<DgradGemm<GeluTile, T, PersistentScheduler, EpilogueDgelu>>(
        stream, shape, x, weight, {out, dgelu, partial})));
  }
  const int64_t row_tiles = divide_up(shape.rows, kDgeluRows);
  return column_sum(stream, partial, {sums}, 1, row_tiles, row_tiles, shape.columns);
}

template <typename T>
cudaError_t MatmulHopper<T>::residual(cudaStream_t stream, const T* x, const T* weight,
                                      const T* bias, const T* residual, T* out,
                                      const GemmShape& shape) {
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  return launch_gemm<ForwardGemm<Tile192, T, PersistentScheduler, EpilogueResidual>>(
      stream, shape, x, weight, {out, residual, bias});
}

template <typename T>
cudaError_t MatmulHopper<T>::delta(cudaStream_t stream, const T* x, const T* weight, const T* out,
                                   T* dout, float* delta, float* partial, int64_t tokens,
                                   const GemmShape& shape) {
  static_assert(kDeltaRows == Tile192::kBlockM && kDeltaColumns == kSwizzleColumns);
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  if (tokens % kDeltaRows != 0 || shape.columns % kDeltaColumns != 0) return cudaErrorNotSupported;
  return launch_gemm<DgradGemm<Tile192, T, PersistentScheduler, EpilogueDelta>>(
      stream, shape, x, weight, {dout, out, delta, partial, tokens});
}

template <typename T>
cudaError_t MatmulHopper<T>::row_clusters(int* clusters) {
  static_assert(kRowTileColumns == Tile192::kBlockN);
  int of_norm = 0, of_backward = 0;
  cudaError_t status = find_clusters<ResidualNormGemm<T>>(&of_norm);
  if (status == cudaSuccess) status = find_clusters<NormBackwardGemm<T>>(&of_backward);
  *clusters = status == cudaSuccess ? std::min(of_norm, of_backward) : 0;
  return status == cudaErrorNotSupported ? cudaSuccess : status;
}

template <typename T>
int64_t MatmulHopper<T>::row_sum_floats(const GemmShape& shape) {
  return EpilogueRows<Tile192, T>::workspace_floats(shape);
}

template <typename T>
cudaError_t MatmulHopper<T>::residual_norm(cudaStream_t stream, const T* x, const T* weight,
                                           const T* bias, const T* xhat, const float* mean,
                                           const float* rstd, float eps, T* out, float* new_mean,
                                           float* new_rstd, float* row_sums,
                                           const GemmShape& shape) {
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  JAXLLM_RETURN_IF_ERROR(fill_sentinel(stream, row_sums, row_sum_floats(shape)));
  return launch_gemm<ResidualNormGemm<T>>(
      stream, shape, x, weight, {out, xhat, bias, mean, rstd, new_mean, new_rstd, row_sums, eps});
}

template <typename T>
cudaError_t MatmulHopper<T>::norm_backward(cudaStream_t stream, const T* dout, const T* weight,
                                           const T* xhat, const float* rstd, T* dtotal,
                                           T* dtotal_sum, float* partial, int64_t partial_floats,
                                           float* row_sums, const GemmShape& shape) {
  static_assert(kNormPartialRows == EpilogueNormBackward<Tile192, T>::kPartialRows);
  if (shape.columns == 0) return cudaSuccess;
  const int64_t column_tiles = divide_up(shape.columns, kRowTileColumns);
  int64_t partial_rows = 0;
  if (shape.rows > 0) {
    int64_t clusters = partial_floats / (kNormPartialRows * shape.columns) * column_tiles;
    JAXLLM_RETURN_IF_ERROR(fill_sentinel(stream, row_sums, row_sum_floats(shape)));
    JAXLLM_RETURN_IF_ERROR(launch_gemm<NormBackwardGemm<T>>(
        stream, shape, dout, weight, {dtotal, xhat, rstd, row_sums, partial}, &clusters));
    partial_rows = clusters / column_tiles * kNormPartialRows;
  }
  return column_sum(stream, partial, {dtotal_sum}, 1, partial_rows, partial_rows, shape.columns);
}

template <typename T>
cudaError_t MatmulHopper<T>::softmax(cudaStream_t stream, const T* x, const T* weight,
                                     bool transpose_weight, T* out, const LogitRows& logits,
                                     const GemmShape& shape) {
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  // Float16 lacks the exponents.
  if constexpr (std::is_same_v<T, __half>) {
    return cudaErrorNotSupported;
  } else {
    static_assert(kSoftmaxColumns == Tile192::kBlockN);
    const auto launch =
        transpose_weight
            ? launch_gemm<DgradGemm<Tile192, T, PersistentScheduler, EpilogueSoftmax>>
            : launch_gemm<ForwardGemm<Tile192, T, PersistentScheduler, EpilogueSoftmax>>;
    return launch(stream, shape, x, weight, {out, logits}, nullptr);
  }
}

template struct MatmulHopper<__nv_bfloat16>;
template struct MatmulHopper<__half>;

}  // namespace jaxllm
