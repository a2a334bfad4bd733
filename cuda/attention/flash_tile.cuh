// Tiles of heads in shared memory, and the products of a warp's rows with them.
//
// A tile's rows are 16 bytes longer than a head is wide: eight rows that stand below each other
// then lie in different banks, whatever the width, and addresses differ by constants.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "attention/flash_block.cuh"
#include "common/cp_async.cuh"
#include "common/fast_math.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "common/vector.cuh"

namespace jaxllm::attention {

template <int kWidth>
inline constexpr int kTileStride = kWidth + 8;

// Whether heads may be moved in packs of eight elements.
template <typename T>
bool heads_are_aligned(const HeadRows<T>& rows, int64_t width) {
  return width % 8 == 0 && rows.row_stride % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(rows.data) % (8 * sizeof(T)) == 0;
}

// Starts copying rows first, first + 1, ... of a head into a tile, with zeros beyond the last row
// and the width. All threads of the block call, and wait for the copies later.
template <int kRows, int kWidth, int kThreads, typename T>
__device__ __forceinline__ void load_tile(T* tile, const T* head, int64_t row_stride, int first,
                                          int rows, int width, bool aligned) {
  if (aligned) {
    constexpr int kPacks = kWidth / 8;
    constexpr int kStep = kThreads / kPacks;  // rows at a time; some threads may have none
    int row = threadIdx.x / kPacks;
    if (kThreads % kPacks != 0 && row >= kStep) return;
    const int column = threadIdx.x % kPacks * 8;
    const T* source = head + (first + row) * row_stride + column;
    tile += row * kTileStride<kWidth> + column;
#pragma unroll
    for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i, row += kStep) {
      if (kRows % kStep != 0 && row >= kRows) break;
      const bool valid = first + row < rows && column < width;
      cp_async_16(tile + i * kStep * kTileStride<kWidth>, valid ? source : head, valid);
      source += kStep * row_stride;
    }
  } else {
#pragma unroll 1
    for (int index = threadIdx.x; index < kRows * kWidth; index += kThreads) {
      const int row = index / kWidth, column = index % kWidth;
      const bool valid = first + row < rows && column < width;
      tile[row * kTileStride<kWidth> + column] =
          valid ? head[(first + row) * row_stride + column] : from_float<T>(0.0f);
    }
  }
}

// The same of float8, which is widened on the way: nothing is left to wait for but a barrier.
template <int kRows, int kWidth, int kThreads, typename T>
__device__ __forceinline__ void load_tile(T* tile, const __nv_fp8_e4m3* head, int64_t row_stride,
                                          int first, int rows, int width, bool aligned) {
  constexpr int kPacks = kWidth / 8;
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
    store(tile + row * kTileStride<kWidth> + column, Pack<T>::of(values));
  }
}

// Rotary embeddings of a block's own rows.
struct Rotation {
  const float *cos, *sin;  // null for none
  int sequences;           // that share a table
  int pairs;
  bool interleaved, whole_packs;
};

inline Rotation make_rotation(const FlashShape& shape, const FlashRope& rope) {
  if (rope.cos == nullptr) return {};
  return {rope.cos,
          rope.sin,
          static_cast<int>(shape.batch / rope.tables),
          static_cast<int>(rope.pairs),
          rope.interleaved,
          rope.pairs % 8 == 0 && aligned_16(rope.cos, rope.sin)};
}

// Turns kRows rows of a warp, in shared memory, by `sign` times the angles of their positions,
// first, first + 1, ... of `length`. Nobody else reads or writes the rows meanwhile.
template <int kWidth, int kRows, typename T>
__device__ void rotate_rows(T* tile, const Rotation& rotation, float sign, int b, int first,
                            int length) {
  const int lane = threadIdx.x % 32, pairs = rotation.pairs;
  const int64_t table = int64_t{b / rotation.sequences} * length * pairs;
  __syncwarp();
  if (rotation.whole_packs) {  // eight pairs at a time
    for (int index = lane; index < kRows * pairs / 8; index += 32) {
      const int row = index / (pairs / 8), pair = index % (pairs / 8) * 8;
      if (first + row >= length) break;
      const int64_t place = table + int64_t{first + row} * pairs + pair;
      const auto cos = load_cached<8>(rotation.cos + place);
      const auto sin = load_cached<8>(rotation.sin + place);
      T* a = tile + row * kTileStride<kWidth> + (rotation.interleaved ? 2 * pair : pair);
      T* b_or_rest = a + (rotation.interleaved ? 8 : pairs);
      const Pack<T> packs[2] = {load<8>(a), load<8>(b_or_rest)};
      float turned[2][8];
      const auto turn = [&](int i, float x, float y, float& out_x, float& out_y) {
        out_x = x * cos[i] - y * (sign * sin[i]);
        out_y = y * cos[i] + x * (sign * sin[i]);
      };
      if (rotation.interleaved) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int pack = i / 4, column = 2 * i % 8;
          turn(i, packs[pack][column], packs[pack][column + 1], turned[pack][column],
               turned[pack][column + 1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) turn(i, packs[0][i], packs[1][i], turned[0][i], turned[1][i]);
      }
      store(a, Pack<T>::of(turned[0]));
      store(b_or_rest, Pack<T>::of(turned[1]));
    }
  } else {
    for (int index = lane; index < kRows * pairs; index += 32) {
      const int row = index / pairs, pair = index % pairs;
      if (first + row >= length) break;
      const int64_t place = table + int64_t{first + row} * pairs + pair;
      const float cos = rotation.cos[place], sin = sign * rotation.sin[place];
      T* a = tile + row * kTileStride<kWidth> + (rotation.interleaved ? 2 * pair : pair);
      T* b_of_pair = a + (rotation.interleaved ? 1 : pairs);
      const float x = to_float(*a), y = to_float(*b_of_pair);
      *a = from_float<T>(x * cos - y * sin);
      *b_of_pair = from_float<T>(y * cos + x * sin);
    }
  }
  __syncwarp();
}

// c += a b^T, where `a` has the rows of the warp and `b` kColumns rows.
template <int kWidth, int kRowTiles, int kColumnTiles, typename T>
__device__ __forceinline__ void multiply_transposed(float (&c)[kRowTiles][kColumnTiles][4],
                                                    const T* a, const T* b) {
  constexpr int kStride = kTileStride<kWidth>;
  const int lane = threadIdx.x % 32;
  a += lane % 16 * kStride + lane / 16 * 8;
  b += (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kWidth; k += 16) {
    uint32_t of_a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) ldmatrix(of_a[m], smem_address(a + m * 16 * kStride + k));
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t of_b[4];
      ldmatrix(of_b, smem_address(b + n * 8 * kStride + k));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_m16n8k16<T>(c[m][n], of_a[m], of_b[0], of_b[1]);
        mma_m16n8k16<T>(c[m][n + 1], of_a[m], of_b[2], of_b[3]);
      }
    }
  }
}

// c += a b, where `a` is a result of multiply_transposed, rounded here, and `b` a tile with a row
// for each of its columns, or some columns of one.
template <int kWidth, int kRowTiles, int kInnerTiles, int kColumnTiles, typename T>
__device__ __forceinline__ void multiply(float (&c)[kRowTiles][kColumnTiles][4],
                                         const float (&a)[kRowTiles][kInnerTiles][4], const T* b) {
  constexpr int kStride = kTileStride<kWidth>;
  const int lane = threadIdx.x % 32;
  b += lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kInnerTiles; k += 2) {
    uint32_t of_a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      of_a[m][0] = pack_pair<T>(a[m][k][0], a[m][k][1]);
      of_a[m][1] = pack_pair<T>(a[m][k][2], a[m][k][3]);
      of_a[m][2] = pack_pair<T>(a[m][k + 1][0], a[m][k + 1][1]);
      of_a[m][3] = pack_pair<T>(a[m][k + 1][2], a[m][k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t of_b[4];
      ldmatrix_transposed(of_b, smem_address(b + k * 8 * kStride + n * 8));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_m16n8k16<T>(c[m][n], of_a[m], of_b[0], of_b[1]);
        mma_m16n8k16<T>(c[m][n + 1], of_a[m], of_b[2], of_b[3]);
      }
    }
  }
}

// Writes `value` where the mask hides a column from a row. Element [m][n][2 * h + c] of a lane is
// in row first_row + 16 * m + 8 * h + lane / 4, column first_column + 8 * n + 2 * (lane % 4) + c.
template <Rows kOwn, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void hide(float (&values)[kRowTiles][kColumnTiles][4], const Mask& mask,
                                     int first_row, int first_column, float value) {
  constexpr bool kRowsAreQueries = kOwn == Rows::kQueries;
  const int32_t* row_segments = kRowsAreQueries ? mask.query_segments : mask.key_segments;
  const int32_t* column_segments = kRowsAreQueries ? mask.key_segments : mask.query_segments;
  const int rows = kRowsAreQueries ? mask.queries : mask.keys;
  const int columns = kRowsAreQueries ? mask.keys : mask.queries;
  const int lane = threadIdx.x % 32;
  first_row += lane / 4;
  first_column += 2 * (lane % 4);

  int segments[kRowTiles][2] = {};
  if (row_segments != nullptr) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + 16 * m + 8 * h;
        if (row < rows) segments[m][h] = row_segments[row];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = first_column + 8 * n + c;
      int segment = 0;
      if (column_segments != nullptr && column < columns) segment = column_segments[column];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = first_row + 16 * m + 8 * h;
          const int query = kRowsAreQueries ? row : column, key = kRowsAreQueries ? column : row;
          const bool seen =
              key < mask.keys && mask.band_has(query, key) && segment == segments[m][h];
          if (!seen) values[m][n][2 * h + c] = value;
        }
      }
    }
  }
}

// Rounds the rows of a warp into `tile`, where nobody else reads or writes them, and has `change`
// change them there; then copies those that there are to a head, whole packs at a time. `first` is
// the head's row of the tile's first.
template <int kWidth, int kRowTiles, int kColumnTiles, typename T, class Change>
__device__ __forceinline__ void store_rows(const float (&values)[kRowTiles][kColumnTiles][4],
                                           T* tile, T* head, int64_t row_stride, int first,
                                           int rows, int width, bool aligned, Change change) {
  constexpr int kStride = kTileStride<kWidth>;
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the other lanes have read what stood there
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      T* target = tile + (16 * m + lane / 4) * kStride + 8 * n + 2 * (lane % 4);
      const float (&x)[4] = values[m][n];
      *reinterpret_cast<uint32_t*>(target) = pack_pair<T>(x[0], x[1]);
      *reinterpret_cast<uint32_t*>(target + 8 * kStride) = pack_pair<T>(x[2], x[3]);
    }
  }
  change();
  __syncwarp();
#pragma unroll 4
  for (int index = lane; index < 16 * kRowTiles * kColumnTiles; index += 32) {
    const int row = index / kColumnTiles, column = index % kColumnTiles * 8;
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

// From products to scores, which are counted in powers of two: factor * product, or where `cap` is
// not 0, cap * tanh(factor * product).
struct Scores {
  float factor, cap;
};

inline Scores make_scores(const FlashOptions& options) {
  if (options.softcap == 0.0f) return {options.scale * kLog2E, 0.0f};
  return {options.scale / options.softcap, options.softcap * kLog2E};
}

}  // namespace jaxllm::attention
