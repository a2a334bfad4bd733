#include <algorithm>

#include "common/shared_needs.h"
#include "gemm/matmul_mma.cuh"
#include "gemm/matmul_mma.h"

namespace jaxllm {
namespace {

constexpr int kRowTilesAtATime = 16;

template <typename T>
constexpr int largest_bytes() {
  using Tile = MmaTile<T>;
  return std::max({Tile::template kBytes<false, false>, Tile::template kBytes<false, true>,
                   Tile::template kBytes<true, false>, Tile::template kBytes<true, true>});
}

const SharedNeed kNeeds[] = {{"matmul_mma_float32", largest_bytes<float>()},
                             {"matmul_mma_16_bits", largest_bytes<__half>()}};

// How many elements a copy may take at once of a matrix whose rows have so many.
template <typename T>
int elements_at_once(const T* data, int64_t row) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  for (const int bytes : {16, 4}) {
    if (address % bytes == 0 && row * int64_t{sizeof(T)} % bytes == 0) return bytes / sizeof(T);
  }
  return 1;
}

}  // namespace

template <typename T>
cudaError_t MatmulMma<T>::run(cudaStream_t stream, const MatmulCall<T>& call) {
  const int64_t a_row = call.transpose_a ? call.rows : call.depth;
  const int64_t b_row = call.transpose_b ? call.depth : call.columns;
  void* const h = call.gelu ? call.h : nullptr;
  const auto addresses =
      reinterpret_cast<std::uintptr_t>(call.out) | reinterpret_cast<std::uintptr_t>(h);
  const bool wide = call.wide || sizeof(T) == 4;
  const bool aligned = call.columns % 2 == 0 && addresses % (wide ? 8 : 4) == 0;
  const MmaMatmul<T> matmul{{call.a, call.rows, call.depth, elements_at_once(call.a, a_row)},
                            {call.b, call.columns, call.depth, elements_at_once(call.b, b_row)},
                            call.bias,
                            h,
                            call.out,
                            wide,
                            call.gelu,
                            aligned,
                            kRowTilesAtATime};
  // In b as it comes the depth is across the rows.
  if (call.transpose_a) {
    return call.transpose_b ? launch_matmul_mma<true, false>(stream, matmul)
                            : launch_matmul_mma<true, true>(stream, matmul);
  }
  return call.transpose_b ? launch_matmul_mma<false, false>(stream, matmul)
                          : launch_matmul_mma<false, true>(stream, matmul);
}

template struct MatmulMma<float>;
template struct MatmulMma<__nv_bfloat16>;
template struct MatmulMma<__half>;

}  // namespace jaxllm
