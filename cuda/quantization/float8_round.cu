// Rounds a matrix to 8-bit floats, and transposes it. The matrix is read once, and each result is
// written once.
#include "common/dependent_launch.cuh"
#include "quantization/float8_round.h"
#include "quantization/float8_round_tile.cuh"

namespace jaxllm {
namespace {

using namespace float8;

// A CTA for each tile; the tiles of a row of tiles follow each other.
template <class V, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_round_kernel(const T* x, const float* scale, int64_t rows, int64_t columns,
                        uint8_t* values, uint8_t* transposed, float* partial) {
  __shared__ RoundingStorage<V> shared;
  const Tile tile(rows, columns);
  Pack<T, kPack> packs[kRowsOfThread];
  tile.load(x, columns, packs);
  round_tile<V, Float8>(tile, packs, InverseScales<V>(tile, scale), shared, values, transposed,
                        partial);
}

}  // namespace

template <typename Float8, typename T>
cudaError_t Float8Rounding<Float8, T>::launch(cudaStream_t stream, int64_t rows, int64_t columns,
                                              Float8* values, Float8* transposed, T* sums,
                                              float* partial) const {
  if (columns == 0) return cudaSuccess;
  if (rows == 0) return sums ? column_sum(stream, partial, {sums}, 1, 0, 0, columns) : cudaSuccess;
  if (!serves(rows, columns, transposed)) return cudaErrorNotSupported;
  if (!aligned<8>(values) || !aligned_16(x, transposed)) return cudaErrorNotSupported;
  const auto run = [&](auto variant) {
    using V = decltype(variant);
    return launch_kernel(stream, float8_round_kernel<V, Float8, T>,
                         {Tile::count(rows, columns), kThreads}, x, scale, rows, columns,
                         reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(transposed),
                         partial);
  };
  if (has_one_scale) {
    return run_with_one_scale(stream, rows, columns, values, transposed, sums, partial, run);
  }
  if (sums || (values && transposed)) return cudaErrorNotSupported;
  return transposed ? run(Variant<false, true, false>{}) : run(Variant<true, false, false>{});
}

int64_t float8_partial_rows(int64_t rows) { return Tile::partial_rows(rows); }

#define JAXLLM_INSTANTIATE(Float8)                       \
  template struct Float8Rounding<Float8, float>;         \
  template struct Float8Rounding<Float8, __nv_bfloat16>; \
  template struct Float8Rounding<Float8, __half>;

JAXLLM_INSTANTIATE(__nv_fp8_e4m3)
JAXLLM_INSTANTIATE(__nv_fp8_e5m2)
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
