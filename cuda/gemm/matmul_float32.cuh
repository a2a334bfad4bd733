// Matrix products in true float32, on the CUDA cores.
//
// A block has a tile of the result, a thread a smaller one in registers. Slices of a and b, kDepth
// deep, come into a ring of buffers by asynchronous copies; in shared memory both lie with the
// depth across the rows, so that a thread reads four neighbours of either at once, whatever the
// operands' layout in memory. The numbers of the next step of the depth are read while those of
// this one are multiplied: a thread's multiplications depend on nothing else, and so follow each
// other without a gap.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation/functions.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "common/tile_order.cuh"

namespace jaxllm {
namespace {

// How a kernel divides its work. A warp has eight by four threads; a thread has quads of four
// neighbouring rows, kWarpRows / 4 / 8 of them 32 rows apart, and of columns, 16 apart.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kDepth_, int kStages_,
          int kBlocks_>
struct Float32Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_, kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kBlocks = kBlocks_;  // on a multiprocessor at once
  static constexpr int kRowQuads = kWarpRows / 32, kColumnQuads = kWarpColumns / 16;
  static constexpr int kWarpsAcross = kColumns / kWarpColumns;
  static constexpr int kThreads = kRows / kWarpRows * kWarpsAcross * 32;
  // Four more than there are: copies of a single number then meet few banks twice.
  static constexpr int kRowStride = kRows + 4, kColumnStride = kColumns + 4;
  static constexpr int kStageFloats = kDepth * (kRowStride + kColumnStride);
  static constexpr int kBytes = kStages * kStageFloats * 4;
};

// An operand: element (i, k) of the side that it shares with the result, and of the depth.
struct Float32Operand {
  const float* data;
  int64_t size, depth;
  bool aligned;  // its rows in memory begin at multiples of 16 bytes
};

struct Float32Matmul {
  Float32Operand a, b;
  const float* bias;  // null for none
  float* h;           // null, or where the product goes before bias and activation
  float* out;
  bool gelu;
  bool aligned;  // the results' rows begin at multiples of 16 bytes
  int row_tiles_at_a_time, row_tiles;
};

// What copies slices of an operand, kSize by kDepth: number (i, k) to target[k * kStride + i]. Of
// kTurned operands the depth is across the rows in memory.
template <int kSize, int kDepth, int kStride, int kThreads, bool kTurned>
class SliceCopier {
 public:
  __device__ __forceinline__ SliceCopier(const Float32Operand& operand, int64_t first)
      : operand_(operand), first_(first) {
    whole_ = first + kSize <= operand.size;
    if constexpr (kTurned) {
      const int row = operand.aligned ? Packs::row() : Singles::row();
      const int column = operand.aligned ? Packs::column() : Singles::column();
      source_ = operand.data + row * operand.size + first + column;
    } else {
      source_ = operand.data + (first + Singles::row()) * operand.depth + Singles::column();
    }
  }

  // Starts the copies of the next slice, which begins at `depth`.
  __device__ __forceinline__ void copy_next(float* target, int64_t depth) {
    if (!whole_ || depth + kDepth > operand_.depth) {
      copy_edge(target, depth);
    } else if (kTurned && operand_.aligned) {
      copy_whole<Packs>(target);
    } else {
      copy_whole<Singles>(target);
    }
    source_ += kTurned ? kDepth * operand_.size : kDepth;
  }

 private:
  // How the threads share a slice, of rows as they are in memory: each has kElements of every
  // kApart-th row, the first of them here.
  template <int kElements_>
  struct Shares {
    static constexpr int kElements = kElements_;
    static constexpr int kRows = kTurned ? kDepth : kSize;
    static constexpr int kAcross = (kTurned ? kSize : kDepth) / kElements;
    static constexpr int kApart = kThreads / kAcross;
    static_assert(kApart * kAcross == kThreads && kRows % kApart == 0);
    __device__ static int row() { return threadIdx.x / kAcross; }
    __device__ static int column() { return threadIdx.x % kAcross * kElements; }
  };
  using Singles = Shares<1>;
  using Packs = Shares<4>;

  template <class Share>
  __device__ __forceinline__ void copy_whole(float* target) const {
    const float* source = source_;
    const int64_t stride = Share::kApart * (kTurned ? operand_.size : operand_.depth);
    const int row = Share::row(), column = Share::column();
    float* const to = target + (kTurned ? row * kStride + column : column * kStride + row);
#pragma unroll
    for (int part = 0; part < Share::kRows / Share::kApart; ++part) {
      float* const part_to = to + part * Share::kApart * (kTurned ? kStride : 1);
      if constexpr (Share::kElements == 4) {
        cp_async_16(part_to, source);
      } else {
        cp_async_4(part_to, source);
      }
      source += stride;
    }
  }

  __device__ __forceinline__ void copy_edge(float* target, int64_t depth) const {
#pragma unroll 1
    for (int at = threadIdx.x; at < kSize * kDepth; at += kThreads) {
      const int i = kTurned ? at % kSize : at / kDepth, k = kTurned ? at / kSize : at % kDepth;
      const bool valid = first_ + i < operand_.size && depth + k < operand_.depth;
      const float* source = operand_.data;
      if (valid) {
        source += kTurned ? (depth + k) * operand_.size + first_ + i
                          : (first_ + i) * operand_.depth + depth + k;
      }
      cp_async_4(target + k * kStride + i, source, valid);
    }
  }

  const Float32Operand& operand_;
  int64_t first_;
  const float* source_;
  bool whole_;
};

template <class Tile>
struct Float32Fragments {
  float a[Tile::kRowQuads][4], b[Tile::kColumnQuads][4];

  __device__ __forceinline__ void load(const float* of_a, const float* of_b) {
#pragma unroll
    for (int quad = 0; quad < Tile::kRowQuads; ++quad) {
      *reinterpret_cast<float4*>(a[quad]) = *reinterpret_cast<const float4*>(of_a + quad * 32);
    }
#pragma unroll
    for (int quad = 0; quad < Tile::kColumnQuads; ++quad) {
      *reinterpret_cast<float4*>(b[quad]) = *reinterpret_cast<const float4*>(of_b + quad * 16);
    }
  }
};

// The first row and column of a block's tile.
struct Float32Origin {
  int64_t row, column;
};

template <class Tile>
__device__ __forceinline__ Float32Origin tile_origin(const Float32Matmul& call) {
  const TilePlace place =
      place_tile(blockIdx.x, call.row_tiles, gridDim.x / call.row_tiles, call.row_tiles_at_a_time);
  return {int64_t{place.row} * Tile::kRows, int64_t{place.column} * Tile::kColumns};
}

__device__ __forceinline__ void store_quad(float* target, const float (&values)[4], int64_t left,
                                           bool aligned) {
  if (aligned && left >= 4) {
    *reinterpret_cast<float4*>(target) = reinterpret_cast<const float4&>(values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) target[i] = values[i];
    }
  }
}

// Finishes a thread's results: row i of them lies row_of(i) below the first, quad j of columns
// 16 j to the right.
template <int kRows, int kColumnQuads, class RowOf>
__device__ __forceinline__ void store_tile(const Float32Matmul& call,
                                           float (&sums)[kRows][kColumnQuads][4], int64_t first_row,
                                           int64_t first_column, RowOf row_of) {
#pragma unroll
  for (int quad = 0; quad < kColumnQuads; ++quad) {
    const int64_t column = first_column + quad * 16, left = call.b.size - column;
    if (left <= 0) break;
    float bias[4] = {};
    if (call.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[i] = i < left ? call.bias[column + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + row_of(i);
      if (row >= call.a.size) break;
      float (&values)[4] = sums[i][quad];
      const int64_t offset = row * call.b.size + column;
      if (call.h != nullptr) store_quad(call.h + offset, values, left, call.aligned);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[j] += bias[j];
        if (call.gelu) values[j] = gelu(values[j]);
      }
      store_quad(call.out + offset, values, left, call.aligned);
    }
  }
}

template <class Tile, bool kTurnA, bool kTurnB>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    matmul_float32_kernel(const __grid_constant__ Float32Matmul call) {
  extern __shared__ __align__(16) float stages[];

  const auto [tile_row, tile_column] = tile_origin<Tile>(call);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / Tile::kWarpsAcross * Tile::kWarpRows + lane / 4 * 4;
  const int column = warp % Tile::kWarpsAcross * Tile::kWarpColumns + lane % 4 * 4;

  SliceCopier<Tile::kRows, Tile::kDepth, Tile::kRowStride, Tile::kThreads, kTurnA> copier_a(
      call.a, tile_row);
  SliceCopier<Tile::kColumns, Tile::kDepth, Tile::kColumnStride, Tile::kThreads, kTurnB> copier_b(
      call.b, tile_column);
  const auto copy = [&](int step, int stage) {
    float* const of_a = stages + stage * Tile::kStageFloats;
    copier_a.copy_next(of_a, int64_t{step} * Tile::kDepth);
    copier_b.copy_next(of_a + Tile::kDepth * Tile::kRowStride, int64_t{step} * Tile::kDepth);
  };

  const int steps = static_cast<int>((call.a.depth + Tile::kDepth - 1) / Tile::kDepth);
#pragma unroll 1
  for (int step = 0; step < Tile::kStages - 1; ++step) {
    if (step < steps) copy(step, step);
    cp_async_commit();
  }
  cp_async_wait<Tile::kStages - 2>();
  __syncthreads();

  float sums[4 * Tile::kRowQuads][Tile::kColumnQuads][4] = {};
  Float32Fragments<Tile> fragments[2];
  const auto load = [&](Float32Fragments<Tile>& into, int stage, int k) {
    const float* const of_a = stages + stage * Tile::kStageFloats;
    const float* const of_b = of_a + Tile::kDepth * Tile::kRowStride;
    into.load(of_a + k * Tile::kRowStride + row, of_b + k * Tile::kColumnStride + column);
  };
  int stage = 0, free_stage = Tile::kStages - 1;
  load(fragments[0], stage, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step + Tile::kStages - 1 < steps) copy(step + Tile::kStages - 1, free_stage);
    cp_async_commit();
    free_stage = stage;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; ++k) {
      if (k == Tile::kDepth - 1) {
        // All have read the last of this stage, and the next one has come.
        cp_async_wait<Tile::kStages - 2>();
        __syncthreads();
        stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
      }
      const Float32Fragments<Tile>& now = fragments[k % 2];
      load(fragments[(k + 1) % 2], stage, (k + 1) % Tile::kDepth);
#pragma unroll
      for (int i = 0; i < 4 * Tile::kRowQuads; ++i) {
#pragma unroll
        for (int j = 0; j < 4 * Tile::kColumnQuads; ++j) {
          float& sum = sums[i][j / 4][j % 4];
          sum = fmaf(now.a[i / 4][i % 4], now.b[j / 4][j % 4], sum);
        }
      }
    }
  }
  store_tile(call, sums, tile_row + row, tile_column + column,
             [](int i) { return i / 4 * 32 + i % 4; });
}

template <class Tile, bool kTurnA, bool kTurnB>
cudaError_t launch_matmul_float32(cudaStream_t stream, Float32Matmul call) {
  const auto kernel = matmul_float32_kernel<Tile, kTurnA, kTurnB>;
  const int64_t row_tiles = divide_up(call.a.size, Tile::kRows);
  const int64_t tiles = row_tiles * divide_up(call.b.size, Tile::kColumns);
  if (tiles >= int64_t{1} << 31) return cudaErrorNotSupported;
  call.row_tiles = static_cast<int>(row_tiles);
  const Launch launch{dim3(static_cast<unsigned>(tiles)), dim3(Tile::kThreads), Tile::kBytes};
  return launch_kernel(stream, kernel, launch, call);
}

}  // namespace
}  // namespace jaxllm
