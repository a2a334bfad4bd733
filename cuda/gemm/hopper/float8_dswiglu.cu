#include "gemm/hopper/epilogue_float8_dswiglu.cuh"
#include "gemm/hopper/float8_derivative.h"
#include "gemm/hopper/float8_mainloop.cuh"
#include "gemm/hopper/kernel.cuh"

namespace jaxllm {
namespace {

using namespace hopper;

// Ping-pong, so that the epilogue of one consumer overlaps the products of the other.
using Tile = GemmTile<192, 4, 2, 1, false, 2, 128>;

}  // namespace

template <typename T>
cudaError_t Float8Dswiglu<T>::launch(cudaStream_t stream, const GemmShape& shape,
                                     __nv_fp8_e5m2* values, __nv_fp8_e5m2* transposed) const {
  if (shape.rows % 16 != 0 || shape.columns % 16 != 0 || shape.depth > kWholeDepthOfFloat8) {
    return cudaErrorNotSupported;
  }
  using Loop = Float8Mainloop<Tile, __nv_fp8_e5m2, __nv_fp8_e4m3, T>;
  return launch_gemm<Gemm<Loop, PersistentScheduler, EpilogueFloat8Dswiglu>, uint8_t>(
      stream, shape, reinterpret_cast<const uint8_t*>(this->a),
      reinterpret_cast<const uint8_t*>(this->b),
      {{reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(transposed)},
       this->h,
       {this->scale_a, this->scale_b, this->scale_out}});
}

template struct Float8Dswiglu<__nv_bfloat16>;
template struct Float8Dswiglu<__half>;

}  // namespace jaxllm
