// Tiles of heads in shared memory, the GEMMs of a warp on them, and the epilogue from an
// accumulator to global memory.
//
// A row of a tile is padded by 16 bytes, so that 8 rows of an ldmatrix lie in different banks
// whatever the head dimension is, and addresses differ by constants (no swizzle):
//
//   row 0   | kHeadDim elements | 16 bytes |
//   row 1   | kHeadDim elements | 16 bytes |
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/flash_tile_scheduler.cuh"
#include "common/cp_async.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "common/vector.cuh"

namespace jaxllm::attention {

template <int kHeadDim>
inline constexpr int kSmemStride = kHeadDim + 8;

// Whether packs of eight elements of all these arrays may be moved.
template <typename... T>
bool heads_are_aligned(int64_t width, const HeadRows<T>&... rows) {
  return width % 8 == 0 && ((rows.row_stride % 8 == 0) && ...) &&
         ((reinterpret_cast<std::uintptr_t>(rows.data) % (8 * sizeof(T)) == 0) && ...);
}

// Starts copies of the rows first, first + 1, ... of a head into a tile, with zeros past the last
// row and past `width`. All threads of the CTA call, and wait for the copies later.
template <int kRows, int kHeadDim, int kThreads, typename T>
__device__ __forceinline__ void load_tile(T* tile, const T* head, int64_t row_stride, int first,
                                          int rows, int width, bool aligned) {
  if (aligned) {
    constexpr int kPacks = kHeadDim / 8;
    constexpr int kStep = kThreads / kPacks;  // rows at a time; some threads may have none
    int row = threadIdx.x / kPacks;
    if (kThreads % kPacks != 0 && row >= kStep) return;
    const int column = threadIdx.x % kPacks * 8;
    const T* source = head + (first + row) * row_stride + column;
    tile += row * kSmemStride<kHeadDim> + column;
#pragma unroll
    for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i, row += kStep) {
      if (kRows % kStep != 0 && row >= kRows) break;
      const bool valid = first + row < rows && column < width;
      cp_async_16(tile + i * kStep * kSmemStride<kHeadDim>, valid ? source : head, valid);
      source += kStep * row_stride;
    }
  } else {
#pragma unroll 1
    for (int index = threadIdx.x; index < kRows * kHeadDim; index += kThreads) {
      const int row = index / kHeadDim, column = index % kHeadDim;
      const bool valid = first + row < rows && column < width;
      tile[row * kSmemStride<kHeadDim> + column] =
          valid ? head[(first + row) * row_stride + column] : from_float<T>(0.0f);
    }
  }
}

// The same for float8, which is converted to T in registers: a barrier alone remains to wait for.
template <int kRows, int kHeadDim, int kThreads, typename T>
__device__ __forceinline__ void load_tile(T* tile, const __nv_fp8_e4m3* head, int64_t row_stride,
                                          int first, int rows, int width, bool aligned) {
  constexpr int kPacks = kHeadDim / 8;
#pragma unroll 2
  for (int index = threadIdx.x; index < kRows * kPacks; index += kThreads) {
    const int row = index / kPacks, column = index % kPacks * 8;
    const __nv_fp8_e4m3* source = head + (first + row) * row_stride + column;
    const bool valid = first + row < rows && column < width;
    alignas(8) __nv_fp8_e4m3 stored[8] = {};
    if (valid && aligned) {
      *reinterpret_cast<uint2*>(stored) = __ldg(reinterpret_cast<const uint2*>(source));
    } else if (valid) {
      for (int i = 0; i < 8 && column + i < width; ++i) stored[i] = source[i];
    }
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(stored[i]);
    store(tile + row * kSmemStride<kHeadDim> + column, Pack<T>::of(values));
  }
}

// An accumulator acc[m][n][i] of a warp has kMTiles x kNTiles MMA tiles of 16 x 8. Element
// [m][n][2 * h + c] of a lane is in row 16 * m + 8 * h + lane / 4, column 8 * n + 2 * (lane % 4) +
// c.

// acc += a b^T, both in shared memory (SS): `a` has the rows of the warp, `b` 8 * kNTiles rows.
template <int kHeadDim, int kMTiles, int kNTiles, typename T>
__device__ __forceinline__ void gemm_ss(float (&acc)[kMTiles][kNTiles][4], const T* a, const T* b) {
  constexpr int kStride = kSmemStride<kHeadDim>;
  const int lane = threadIdx.x % 32;
  a += lane % 16 * kStride + lane / 16 * 8;
  b += (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    uint32_t a_fragment[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ldmatrix(a_fragment[m], smem_address(a + m * 16 * kStride + k));
    }
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t b_fragment[4];
      ldmatrix(b_fragment, smem_address(b + n * 8 * kStride + k));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        mma_m16n8k16<T>(acc[m][n], a_fragment[m], b_fragment[0], b_fragment[1]);
        mma_m16n8k16<T>(acc[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3]);
      }
    }
  }
}

// acc += a b with `a` in registers (RS), an accumulator that is rounded here; `b` is a tile with a
// row for each column of `a`, or some columns of such a tile.
template <int kHeadDim, int kMTiles, int kKTiles, int kNTiles, typename T>
__device__ __forceinline__ void gemm_rs(float (&acc)[kMTiles][kNTiles][4],
                                        const float (&a)[kMTiles][kKTiles][4], const T* b) {
  constexpr int kStride = kSmemStride<kHeadDim>;
  const int lane = threadIdx.x % 32;
  b += lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kKTiles; k += 2) {
    uint32_t a_fragment[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = a[m][k + i / 2];
        a_fragment[m][i] = pack_pair<T>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t b_fragment[4];
      ldmatrix_transposed(b_fragment, smem_address(b + k * 8 * kStride + n * 8));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        mma_m16n8k16<T>(acc[m][n], a_fragment[m], b_fragment[0], b_fragment[1]);
        mma_m16n8k16<T>(acc[m][n + 1], a_fragment[m], b_fragment[2], b_fragment[3]);
      }
    }
  }
}

// Calls function(x) for each element x.
template <int kMTiles, int kNTiles, class Function>
__device__ __forceinline__ void for_each_element(float (&acc)[kMTiles][kNTiles][4],
                                                 Function function) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) function(acc[m][n][i]);
    }
  }
}

// For each column calls column(n, c), then function(acc[m][n][2 * h + c], its result, m, h, n, c)
// for each element of the column.
template <int kMTiles, int kNTiles, class Column, class Function>
__device__ __forceinline__ void for_each_element(float (&acc)[kMTiles][kNTiles][4], Column column,
                                                 Function function) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto of_column = column(n, c);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) function(acc[m][n][2 * h + c], of_column, m, h, n, c);
      }
    }
  }
}

// The epilogue. Rounds the rows of a warp into `tile`, which no other warp reads or writes, and
// calls transform(). Then copies the rows before `rows` to a head, whole packs at a time where
// `aligned`. `first` is the head's row of the tile's first.
template <int kHeadDim, int kMTiles, int kNTiles, typename T, class Transform>
__device__ __forceinline__ void store_accumulator(const float (&acc)[kMTiles][kNTiles][4], T* tile,
                                                  T* head, int64_t row_stride, int first, int rows,
                                                  int width, bool aligned, Transform transform) {
  constexpr int kStride = kSmemStride<kHeadDim>;
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the other lanes have read the tile
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      T* target = tile + (16 * m + lane / 4) * kStride + 8 * n + 2 * (lane % 4);
      const float (&x)[4] = acc[m][n];
      *reinterpret_cast<uint32_t*>(target) = pack_pair<T>(x[0], x[1]);
      *reinterpret_cast<uint32_t*>(target + 8 * kStride) = pack_pair<T>(x[2], x[3]);
    }
  }
  transform();
  __syncwarp();
#pragma unroll 4
  for (int index = lane; index < 16 * kMTiles * kNTiles; index += 32) {
    const int row = index / kNTiles, column = index % kNTiles * 8;
    if (first + row >= rows || column >= width) continue;
    const T* source = tile + row * kStride + column;
    T* target = head + (first + row) * row_stride + column;
    if (aligned) {
      *reinterpret_cast<int4*>(target) = *reinterpret_cast<const int4*>(source);
    } else {
      for (int i = 0; i < min(8, width - column); ++i) target[i] = source[i];
    }
  }
}

}  // namespace jaxllm::attention
