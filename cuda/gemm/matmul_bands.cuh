// Hopper's matrix products: what becomes of a finished tile.
//
// Each warp works by itself on its rows, a band after the other: it leaves the rounded result in a
// slot of shared memory, and one lane has the copy engine store it. Where the product is added to
// an array the same slots bring in the bands of that, three bands ahead.
//
// All this must take no longer than the product of the other multiplier's tile. It is a matter of
// latency, with four warps at work on it: hence the batches of numbers that go through the
// activation together. gemm/matmul_slopes.cuh has what concerns an activation's slope.
#pragma once

#include "activation/gelu_each.cuh"
#include "common/fragment.cuh"
#include "common/vector.cuh"
#include "gemm/matmul_tiles.cuh"

namespace jaxllm {
namespace {

// What a warp of a multiplier works with.
template <class Shape, typename T>
struct BandWarp {
  MatmulShared<T, Shape>& shared;
  const MatmulArguments<T>& arguments;
  const CUtensorMap& out_map;
  const CUtensorMap& saved_map;
  int multiplier, warp, lane;
  uint32_t biases[Shape::kSlabs] = {};  // of the tile: of a slab's 64, two in each lane
  int bands_done = 0;

  // Loads the biases of a tile's columns; zeros beyond the matrix.
  __device__ __forceinline__ void load_biases(const TileOrigin& origin) {
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      const int column = origin.column + slab * kSwizzleColumns + 2 * lane;
      biases[slab] = 0;
      if (arguments.bias != nullptr && column < arguments.columns) {
        biases[slab] = __ldg(reinterpret_cast<const uint32_t*>(arguments.bias + column));
      }
    }
  }

  // Those of the lane's two columns among the eight from 8 j of a slab on.
  __device__ __forceinline__ float2 bias(int slab, int j) const {
    return unpack_pair<T>(__shfl_sync(0xffffffff, biases[slab], 4 * j + lane % 4));
  }

  __device__ __forceinline__ T* slot(int index) const {
    return shared.slots[multiplier][warp][index];
  }
  __device__ __forceinline__ int column(const TileOrigin& origin, int band) const {
    return origin.column + band / Shape::kBlocksOf64 * kSwizzleColumns;
  }
  __device__ __forceinline__ int row(const TileOrigin& origin, int band) const {
    return origin.row + band % Shape::kBlocksOf64 * 64 + warp * kBandRows;
  }

  // The row of a band's matrices that the lane names, those of columns 0 to 15: rows 0 to 7 of the
  // first eight columns, rows 8 to 15 of them, and both of the next eight. For columns 8 j to
  // 8 j + 15, j even, the address ^ 16 j.
  __device__ __forceinline__ uint32_t matrix_row(const T* band) const {
    const uint32_t row = lane % 8, half = lane / 8 % 2, odd = lane / 16;
    return smem_address(band) + (row + 8 * half) * kSwizzleRowBytes + (odd ^ row) * 16;
  }
};

// So many times eight columns of a band go through the activation together: of each, the lane has
// two pairs of neighbours, in row lane / 4 and in the row 8 below (`half`).
constexpr int kBatch = 2;
constexpr int kBatchElements = 4 * kBatch;

// Where an accumulator has the first of a pair.
__device__ __forceinline__ constexpr int sum_index(int slab, int j, int half) {
  return 4 * (8 * slab + j) + 2 * half;
}

// Puts the biases where the product will be added to them.
template <class Shape, typename T>
__device__ __forceinline__ void begin_with_biases(
    const BandWarp<Shape, T>& warp, float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2]) {
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 bias = warp.bias(slab, j);
#pragma unroll
      for (auto& of_block : sums) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          of_block[sum_index(slab, j, half)] = bias.x;
          of_block[sum_index(slab, j, half) + 1] = bias.y;
        }
      }
    }
  }
}

// A slot for a band, once the copy engine has read what it had. So many slots take turns as divide
// the bands of a tile: the turns go on from tile to tile.
template <class Shape, typename T>
__device__ __forceinline__ T* free_slot(const BandWarp<Shape, T>& warp, int band) {
  constexpr int kTurns = Shape::kBands % kSlots == 0 ? kSlots : kSlots - 1;
  static_assert(Shape::kBands % kTurns == 0);
  if (warp.lane == 0) tma_store_wait_read<kTurns - 1>();
  __syncwarp();
  return warp.slot(band % kTurns);
}

template <class Shape, typename T>
__device__ __forceinline__ void store_band(const BandWarp<Shape, T>& warp, const T* slot,
                                           const TileOrigin& origin, int band) {
  fence_async_proxy();
  __syncwarp();
  if (warp.lane == 0) {
    tma_store_2d(warp.out_map, slot, warp.column(origin, band), warp.row(origin, band));
    tma_store_commit();
  }
}

// Stores out = p + bias, where `sums` has that.
template <class Shape, typename T>
__device__ __forceinline__ void finish_bias(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin) {
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    T* const out = free_slot(warp, band);
#pragma unroll
    for (int first = 0; first < 8; first += kBatch) {
      uint32_t words[2 * kBatch];
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        const int at = sum_index(slab, first + i / 2, i % 2);
        words[i] = pack_pair<T>(sums[block][at], sums[block][at + 1]);
      }
      stmatrix(warp.matrix_row(out) ^ 16 * first, words);
    }
    store_band(warp, out, origin, band);
  }
}

// Stores p + bias in float32, where `sums` has p, past the slots: four lanes of a row write 32
// bytes of it, a sector.
template <class Shape, typename T>
__device__ __forceinline__ void finish_wide(
    const BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin) {
  const int64_t columns = warp.arguments.columns;
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 bias = warp.bias(slab, j);
      const int column = warp.column(origin, band) + 8 * j + warp.lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp.row(origin, band) + warp.lane / 4 + 8 * half;
        const int at = sum_index(slab, j, half);
        if (row < warp.arguments.rows && column < columns) {
          *reinterpret_cast<float2*>(warp.arguments.wide_out + row * columns + column) = {
              sums[block][at] + bias.x, sums[block][at + 1] + bias.y};
        }
      }
    }
  }
}

// Stores out = gelu(p + bias), where `sums` has the product p, and p itself in `saved`.
template <class Shape, typename T>
__device__ __forceinline__ void finish_gelu(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin) {
  static_assert(Shape::kBands % 2 == 0);
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    T* const saved = warp.slot(band % 2 * 2);
    T* const out = warp.slot(band % 2 * 2 + 1);
    // All but the stores of the band before have left their slots.
    if (warp.lane == 0) tma_store_wait_read<1>();
    __syncwarp();
#pragma unroll
    for (int first = 0; first < 8; first += kBatch) {
      float x[kBatchElements];
      uint32_t words[2 * kBatch];
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        const int j = first + i / 2, at = sum_index(slab, j, i % 2);
        const float2 bias = warp.bias(slab, j);
        words[i] = pack_pair<T>(sums[block][at], sums[block][at + 1]);
        x[2 * i] = sums[block][at] + bias.x;
        x[2 * i + 1] = sums[block][at + 1] + bias.y;
      }
      gelu_each(x);
      stmatrix(warp.matrix_row(saved) ^ 16 * first, words);
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      stmatrix(warp.matrix_row(out) ^ 16 * first, words);
    }
    fence_async_proxy();
    __syncwarp();
    if (warp.lane == 0) {
      const int column = warp.column(origin, band), row = warp.row(origin, band);
      tma_store_2d(warp.saved_map, saved, column, row);
      tma_store_2d(warp.out_map, out, column, row);
      tma_store_commit();
    }
  }
}

// One lane's task: has a band of the other array copied into a slot.
template <class Shape, typename T>
__device__ __forceinline__ void load_saved(BandWarp<Shape, T>& warp, int slot,
                                           const TileOrigin& origin, int band) {
  Barrier& saved = warp.shared.saved[warp.multiplier][warp.warp][slot];
  saved.arrive_and_expect(kBandSize * sizeof(T));
  tma_load_2d(warp.slot(slot), warp.saved_map, warp.column(origin, band), warp.row(origin, band),
              saved);
}

constexpr int kBandsAhead = kSlots - 1;

// Has a tile's first `kCount` bands of the other array brought in.
template <int kCount, class Shape, typename T>
__device__ __forceinline__ void load_first_saved(BandWarp<Shape, T>& warp,
                                                 const TileOrigin& origin) {
  static_assert(kCount <= Shape::kBands && kCount <= kSlots);
  if (warp.lane > 0) return;
  for (int band = 0; band < kCount; ++band) {
    load_saved(warp, (warp.bands_done + band) % kSlots, origin, band);
  }
}

// Puts change(j, half, saved) in the place of each pair of neighbours of a band that was saved: of
// the lane's two in columns 8 j to 8 j + 7, in row lane / 4 or (`half`) the row 8 below.
template <class Shape, typename T, class Change>
__device__ __forceinline__ void change_band(const BandWarp<Shape, T>& warp, const T* band,
                                            const Change& change) {
  const uint32_t row = warp.matrix_row(band);
  uint32_t words[4], next[4];
  ldmatrix(next, row);
#pragma unroll
  for (int first = 0; first < 8; first += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = next[i];
    // Ahead of the stores, which the compiler must take for stores to the same place.
    if (first < 6) ldmatrix(next, row ^ 16 * (first + 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 changed = change(first + i / 2, i % 2, unpack_pair<T>(words[i]));
      words[i] = pack_pair<T>(changed.x, changed.y);
    }
    stmatrix(row ^ 16 * first, words);
  }
}

// Stores a band that has been finished in the slot that it came in, and has the band that is
// kBandsAhead of it, of this tile or of the warp's next, copied into the slot before, which comes
// free.
template <class Shape, typename T>
__device__ __forceinline__ void store_and_load_ahead(BandWarp<Shape, T>& warp, int slot, int band,
                                                     const TileOrigin& origin,
                                                     const TileOrigin& next, bool has_next) {
  fence_async_proxy();
  __syncwarp();
  if (warp.lane == 0) {
    tma_store_2d(warp.out_map, warp.slot(slot), warp.column(origin, band), warp.row(origin, band));
    tma_store_commit();
    // The band before this one has left its slot.
    tma_store_wait_read<1>();
    const int free_slot = (slot + kBandsAhead) % kSlots, later = band + kBandsAhead;
    if (later < Shape::kBands) {
      load_saved(warp, free_slot, origin, later);
    } else if (has_next) {
      load_saved(warp, free_slot, next, later - Shape::kBands);
    }
  }
  __syncwarp();
}

// Stores out = p + bias + residual, where `sums` has p + bias. Sees to it that the bands of the
// residual of the warp's `next` tile come in too.
template <class Shape, typename T>
__device__ __forceinline__ void finish_residual(
    BandWarp<Shape, T>& warp, const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const TileOrigin& origin, const TileOrigin& next, bool has_next) {
#pragma unroll
  for (int band = 0; band < Shape::kBands; ++band) {
    const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
    const int position = warp.bands_done + band, slot = position % kSlots;
    warp.shared.saved[warp.multiplier][warp.warp][slot].wait(position / kSlots & 1);
    change_band(warp, warp.slot(slot), [&](int j, int half, float2 residual) {
      const int at = sum_index(slab, j, half);
      return float2{sums[block][at] + residual.x, sums[block][at + 1] + residual.y};
    });
    store_and_load_ahead(warp, slot, band, origin, next, has_next);
  }
  warp.bands_done += Shape::kBands;
}

}  // namespace
}  // namespace jaxllm
