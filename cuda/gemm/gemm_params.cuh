// Parameters and launch of the GEMMs that have one CTA for each output tile: gemm/mma on tensor
// cores from sm_80 on, and gemm/float32 on CUDA cores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/tile_order.cuh"
#include "gemm/matmul_call.h"

namespace jaxllm {
namespace {

// An operand in global memory, row-major. `extent` is M for a and N for b; `depth` is K.
//
//   K-major    (extent, depth)   a as it comes, or b transposed
//   MN-major   (depth, extent)   a transposed, or b as it comes
template <typename T>
struct GemmOperand {
  const T* data;
  int64_t extent, depth;
  int vector;  // elements of the widest copy that its rows' alignment permits, up to 16 bytes
};

template <typename T>
struct GemmParams {
  GemmOperand<T> a, b;
  const T* bias;  // null for none
  void* h;        // auxiliary output, the product before bias and activation; null for none
  void* out;
  bool gelu;
  bool aligned;      // rows of h and out permit vector stores
  bool float32_out;  // h and out are float32, whatever T is
  int row_tiles_at_a_time, row_tiles;
};

template <typename T>
int copy_vector(const T* data, int64_t row_elements) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  for (const int bytes : {16, 4}) {
    if ((address | row_elements * sizeof(T)) % bytes == 0) return bytes / sizeof(T);
  }
  return 1;
}

// The parameters of a kernel whose threads store kStoreVector elements at once.
template <int kStoreVector, typename T>
GemmParams<T> make_params(const MatmulCall<T>& call) {
  const int64_t a_row = call.transpose_a ? call.rows : call.depth;
  const int64_t b_row = call.transpose_b ? call.depth : call.columns;
  void* const h = call.gelu ? call.h : nullptr;
  const bool float32_out = call.float32_out || sizeof(T) == 4;
  const auto addresses =
      reinterpret_cast<std::uintptr_t>(call.out) | reinterpret_cast<std::uintptr_t>(h);
  const bool aligned = call.columns % kStoreVector == 0 &&
                       addresses % (kStoreVector * (float32_out ? 4 : sizeof(T))) == 0;
  return {{call.a, call.rows, call.depth, copy_vector(call.a, a_row)},
          {call.b, call.columns, call.depth, copy_vector(call.b, b_row)},
          call.bias,
          h,
          call.out,
          call.gelu,
          aligned,
          float32_out,
          16};
}

// Calls launch(a is MN-major, b is MN-major) with std::bool_constants.
template <typename T, class Launcher>
cudaError_t dispatch_majors(const MatmulCall<T>& call, Launcher launch) {
  constexpr std::true_type kMn;
  constexpr std::false_type kK;
  if (call.transpose_a) return call.transpose_b ? launch(kMn, kK) : launch(kMn, kMn);
  return call.transpose_b ? launch(kK, kK) : launch(kK, kMn);
}

// Launches one CTA for each kBlockM x kBlockN tile of the output.
template <class Tile, class Kernel, typename T, class... TensorMaps>
cudaError_t launch_tiles(cudaStream_t stream, Kernel kernel, int smem_bytes, GemmParams<T> params,
                         const TensorMaps&... maps) {
  const int64_t row_tiles = divide_up(params.a.extent, Tile::kBlockM);
  const int64_t tiles = row_tiles * divide_up(params.b.extent, Tile::kBlockN);
  if (tiles >= int64_t{1} << 31) return cudaErrorNotSupported;
  params.row_tiles = static_cast<int>(row_tiles);
  const Launch launch{dim3(static_cast<unsigned>(tiles)), dim3(Tile::kThreads),
                      static_cast<size_t>(smem_bytes)};
  return launch_kernel(stream, kernel, launch, maps..., params);
}

// The first row and column of this CTA's tile.
struct TileOrigin {
  int64_t row, column;
};

template <class Tile, typename T>
__device__ __forceinline__ TileOrigin tile_origin(const GemmParams<T>& params) {
  const TileCoord tile = tile_coord(blockIdx.x, params.row_tiles, gridDim.x / params.row_tiles,
                                    params.row_tiles_at_a_time);
  return {int64_t{tile.row} * Tile::kBlockM, int64_t{tile.column} * Tile::kBlockN};
}

}  // namespace
}  // namespace jaxllm
