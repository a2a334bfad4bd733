// Activations and their gradients in 8-bit floats. Each input is read once, and each result is
// written once.
#include "activation/functions.cuh"
#include "activation/swiglu_each.cuh"
#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "quantization/float8_activation.h"
#include "quantization/float8_tile.cuh"

namespace jaxllm {
namespace {

using namespace float8;

// What computes an element of each result from one of each input, as elementwise.cuh calls it.
template <class Activation>
struct Formulas;
template <>
struct Formulas<Float8Gelu> {
  using Forward = GeluForward;
  using Backward = GeluBackward;
};
template <>
struct Formulas<Float8Swiglu> {
  using Forward = SwigluForward;
  using Backward = SwigluBackward;
};

// Op computes kResults elements of an element of each of kParts parts of h, and in the backward of
// one of dout. Two results are the parts of `values`.
template <class Op, int kParts, bool kBackward, bool kTransposed, bool kSums, typename Float8,
          typename T>
__global__ void __launch_bounds__(kThreads)
    float8_activation_kernel(const T* h, const T* dout, const float* scale, int64_t rows,
                             int64_t width, uint8_t* values, uint8_t* transposed, float* partial) {
  constexpr int kInputs = kParts + (kBackward ? 1 : 0), kResults = kBackward ? kParts : 1;
  __shared__ alignas(16) uint32_t shared[kTransposed ? kResults * kSharedWords : 1];
  const Tile tile(rows, width);
  Pack<T, kPack> packs[kInputs][kRowsOfThread];
#pragma unroll
  for (int k = 0; k < kParts; ++k) tile.load(h + k * width, kParts * width, packs[k]);
  if constexpr (kBackward) tile.load(dout, width, packs[kParts]);
  const float inverse = __frcp_rn(__ldg(scale));

  Words words[kResults];
  float sums[kResults][kPack] = {};
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    float quotients[kResults][kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      float in[kInputs], out[kResults];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) in[k] = packs[k][i][j];
      Op{}(in, out);
#pragma unroll
      for (int k = 0; k < kResults; ++k) {
        if constexpr (kSums) sums[k][j] += out[k];
        quotients[k][j] = out[k] * inverse;
      }
    }
#pragma unroll
    for (int k = 0; k < kResults; ++k) words[k].template set_row<Float8>(i, quotients[k]);
  }
#pragma unroll
  for (int k = 0; k < kResults; ++k) {
    tile.store(words[k], values + k * width, kResults * width);
    if constexpr (kTransposed) tile.stage_transposed(words[k], shared + k * kSharedWords);
  }
  if constexpr (kTransposed) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kResults; ++k) {
      tile.store_transposed(shared + k * kSharedWords, transposed + k * width * rows);
    }
  }
  if constexpr (kSums) {
    __shared__ float of_warps[kThreads / 32][kResults * kTileColumns];
    tile.store_sums(sums, of_warps, partial);
  }
}

template <class Op, int kParts, bool kBackward, bool kTransposed, bool kSums, typename Float8,
          typename T>
cudaError_t launch(cudaStream_t stream, const T* h, const T* dout, const float* scale, int64_t rows,
                   int64_t width, Float8* values, Float8* transposed, float* partial) {
  if (!serves(rows, width, kTransposed) || !aligned<8>(values) ||
      !aligned_16(h, dout, transposed)) {
    return cudaErrorNotSupported;
  }
  return launch_kernel(
      stream, float8_activation_kernel<Op, kParts, kBackward, kTransposed, kSums, Float8, T>,
      {Tile::count(rows, width), kThreads}, h, dout, scale, rows, width,
      reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(transposed), partial);
}

}  // namespace

template <class Activation, typename T>
cudaError_t Float8Activation<Activation, T>::forward(cudaStream_t stream, __nv_fp8_e4m3* values,
                                                     __nv_fp8_e4m3* transposed) const {
  using Op = typename Formulas<Activation>::Forward;
  if (rows == 0 || width == 0) return cudaSuccess;
  const auto run = [&](auto launcher) {
    return launcher(stream, h, nullptr, scale, rows, width, values, transposed, nullptr);
  };
  constexpr int kParts = Activation::kParts;
  return transposed ? run(launch<Op, kParts, false, true, false, __nv_fp8_e4m3, T>)
                    : run(launch<Op, kParts, false, false, false, __nv_fp8_e4m3, T>);
}

template <class Activation, typename T>
cudaError_t Float8Activation<Activation, T>::backward(cudaStream_t stream, const T* dout,
                                                      __nv_fp8_e5m2* values,
                                                      __nv_fp8_e5m2* transposed, T* dbias,
                                                      float* partial) const {
  using Op = typename Formulas<Activation>::Backward;
  constexpr int kParts = Activation::kParts;
  const int64_t columns = kParts * width;
  if (columns == 0) return cudaSuccess;
  if (rows > 0) {
    const auto run = [&](auto launcher) {
      return launcher(stream, h, dout, scale, rows, width, values, transposed, partial);
    };
    JAXLLM_RETURN_IF_ERROR(dbias ? run(launch<Op, kParts, true, true, true, __nv_fp8_e5m2, T>)
                                 : run(launch<Op, kParts, true, true, false, __nv_fp8_e5m2, T>));
  }
  if (!dbias) return cudaSuccess;
  const int64_t partials = Tile::partial_rows(rows);
  return column_sum(stream, partial, {dbias}, 1, partials, partials, columns);
}

#define JAXLLM_INSTANTIATE(Activation)                         \
  template struct Float8Activation<Activation, float>;         \
  template struct Float8Activation<Activation, __nv_bfloat16>; \
  template struct Float8Activation<Activation, __half>;

JAXLLM_INSTANTIATE(Float8Gelu)
JAXLLM_INSTANTIATE(Float8Swiglu)
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
