#include "common/column_sum.cuh"
#include "gemm/hopper/epilogue_float8_dgelu.cuh"
#include "gemm/hopper/float8_derivative.h"
#include "gemm/hopper/float8_mainloop.cuh"
#include "gemm/hopper/kernel.cuh"

namespace jaxllm {
namespace {

using namespace hopper;

// Ping-pong, so that the epilogue of one consumer overlaps the products of the other.
using Tile = GemmTile<192, 4, 2, 1, false, 2, 128>;
static_assert(Tile::kBlockM == kFloat8DgeluRows);

}  // namespace

template <typename T>
cudaError_t Float8Dgelu<T>::launch(cudaStream_t stream, const GemmShape& shape,
                                   __nv_fp8_e5m2* values, __nv_fp8_e5m2* transposed, T* dbias,
                                   float* partial) const {
  if (shape.rows % 16 != 0 || shape.columns % 16 != 0 || shape.depth > kWholeDepthOfFloat8) {
    return cudaErrorNotSupported;
  }
  using Loop = Float8Mainloop<Tile, __nv_fp8_e5m2, __nv_fp8_e4m3, T>;
  using Kernel = Gemm<Loop, PersistentScheduler, EpilogueFloat8Dgelu>;
  JAXLLM_RETURN_IF_ERROR((launch_gemm<Kernel, uint8_t>(
      stream, shape, reinterpret_cast<const uint8_t*>(this->a),
      reinterpret_cast<const uint8_t*>(this->b),
      {{reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(transposed)},
       this->h,
       {this->scale_a, this->scale_b, this->scale_out},
       dbias != nullptr ? partial : nullptr})));
  if (dbias == nullptr) return cudaSuccess;
  const int64_t row_tiles = divide_up(shape.rows, kFloat8DgeluRows);
  return column_sum(stream, partial, {dbias}, 1, row_tiles, row_tiles, shape.columns);
}

template struct Float8Dgelu<__nv_bfloat16>;
template struct Float8Dgelu<__half>;

}  // namespace jaxllm
