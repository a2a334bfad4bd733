// SwiGLU and its gradients in 8-bit floats. Each input is read once, and each result is written
// once.
#include "activation/swiglu_each.cuh"
#include "common/dependent_launch.cuh"
#include "quantization/float8_swiglu.h"
#include "quantization/float8_tile.cuh"

namespace jaxllm {
namespace {

using namespace float8;

// Op computes kResults elements of an element of each of kInputs arrays, as in elementwise.cuh. The
// first two arrays are the halves of gate_up's rows, and two results are those of `values`.
template <class Op, int kInputs, int kResults, bool kTransposed, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_swiglu_kernel(const T* gate_up, const T* dout, const float* scale, int64_t rows,
                         int64_t width, uint8_t* values, uint8_t* transposed) {
  __shared__ alignas(16) uint32_t shared[kTransposed ? kResults * kSharedWords : 1];
  const Tile tile(rows, width);
  Pack<T, kPack> packs[kInputs][kRowsOfThread];
  tile.load(gate_up, 2 * width, packs[0]);
  tile.load(gate_up + width, 2 * width, packs[1]);
  if constexpr (kInputs == 3) tile.load(dout, width, packs[2]);
  const float inverse = __frcp_rn(__ldg(scale));

  Words words[kResults];
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
      for (int k = 0; k < kResults; ++k) quotients[k][j] = out[k] * inverse;
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
}

template <class Op, int kInputs, int kResults, bool kTransposed, typename Float8, typename T>
cudaError_t launch(cudaStream_t stream, const Float8Swiglu<T>& call, const T* dout, Float8* values,
                   Float8* transposed) {
  if (call.rows == 0 || call.width == 0) return cudaSuccess;
  if (!serves(call.rows, call.width, kTransposed) ||
      !aligned_16(call.gate_up, dout, values, transposed)) {
    return cudaErrorNotSupported;
  }
  return launch_kernel(stream, float8_swiglu_kernel<Op, kInputs, kResults, kTransposed, Float8, T>,
                       {Tile::count(call.rows, call.width), kThreads}, call.gate_up, dout,
                       call.scale, call.rows, call.width, reinterpret_cast<uint8_t*>(values),
                       reinterpret_cast<uint8_t*>(transposed));
}

}  // namespace

template <typename T>
cudaError_t Float8Swiglu<T>::forward(cudaStream_t stream, __nv_fp8_e4m3* values,
                                     __nv_fp8_e4m3* transposed) const {
  const T* const none = nullptr;
  return transposed ? launch<SwigluForward, 2, 1, true>(stream, *this, none, values, transposed)
                    : launch<SwigluForward, 2, 1, false>(stream, *this, none, values, transposed);
}

template <typename T>
cudaError_t Float8Swiglu<T>::backward(cudaStream_t stream, const T* dout, __nv_fp8_e5m2* values,
                                      __nv_fp8_e5m2* transposed) const {
  return launch<SwigluBackward, 3, 2, true>(stream, *this, dout, values, transposed);
}

template struct Float8Swiglu<float>;
template struct Float8Swiglu<__nv_bfloat16>;
template struct Float8Swiglu<__half>;

}  // namespace jaxllm
