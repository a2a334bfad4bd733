// Hopper's matrix products: the end of a tile of a product p that is the gradient of what a layer
// norm puts out. What leaves is the gradient of what the norm reads, added to another that is there
// already, the one along the residual stream:
//
//   out += rstd (g - mean(g) - xhat mean(g xhat)),  g = scale p,  xhat = rstd (x - mean(x)).
//
// The means are over a row, and a tile has a part of a row. So a tile is gone through twice: once
// for its part of the sums, which it leaves in global memory for the tiles beside it, and again
// with all parts of them. Those tiles are with other multiprocessors, at the same time: a launch
// has as many blocks as run at once, and takes the tiles of a row one after the other.
#pragma once

#include "gemm/matmul_column_sums.cuh"

namespace jaxllm {
namespace {

// ---- The bands of a tile. A warp's four slots take four each, of x twice and of out: those of x
// in order in the first pass, and of x and out from the last to the first in the second, which
// finds the last two of x still there. Tiles of another number of bands would need another plan.

template <class Shape, typename T>
struct NormBands {
  static_assert(Shape::kBands == 6 && kSlots == 4);

  const BandWarp<Shape, T>& warp;
  const TileOrigin& origin;

  // One lane's task: has a band copied into a slot.
  __device__ __forceinline__ void load(const CUtensorMap& map, int slot, int band) const {
    Barrier& saved = warp.shared.saved[warp.multiplier][warp.warp][slot];
    saved.arrive_and_expect(kBandSize * sizeof(T));
    load_matrix_box(warp.slot(slot), map, warp.column(origin, band), warp.row(origin, band), saved);
  }

  // Waits for a slot's band for the `use`-th time in this tile.
  __device__ __forceinline__ void wait(int slot, int use) const {
    warp.shared.saved[warp.multiplier][warp.warp][slot].wait(use & 1);
  }
};

// One lane's task: has a tile's first bands of x brought in.
template <class Shape, typename T>
__device__ __forceinline__ void load_first_of_x(const BandWarp<Shape, T>& warp,
                                                const TileOrigin& origin) {
  const NormBands<Shape, T> bands{warp, origin};
#pragma unroll
  for (int band = 0; band < kSlots; ++band) bands.load(warp.saved_map, band, band);
}

// ---- What belongs to rows. A warp has 16 of each 64, and a lane what belongs to one of those 32.

struct RowStatistics {
  float mean = 0.0f, rstd = 0.0f;
};

template <class Shape, typename T>
__device__ __forceinline__ RowStatistics load_statistics(const BandWarp<Shape, T>& warp,
                                                         const TileOrigin& origin) {
  const int row = warp.row(origin, warp.lane / kBandRows) + warp.lane % kBandRows;
  if (row >= warp.arguments.rows) return {};
  return {__ldg(warp.arguments.norm.mean + row), __ldg(warp.arguments.norm.rstd + row)};
}

// A lane's value of a row as the accumulators have rows: that of lane / 4, or (`half`) 8 below, of
// the first or the second 64.
__device__ __forceinline__ float value_of_row(float value, int block, int half, int lane) {
  return __shfl_sync(0xffffffff, value, kBandRows * block + 8 * half + lane / 4);
}

// Two sums of each row of a tile: of g, and of g xhat.
constexpr int kRowSums = 64;  // of a warp

// Where the warp's are, of the tiles of a row from the first column on, 4 kRowSums apart.
template <class Shape, typename T>
__device__ __forceinline__ float* row_sums_of_warp(const BandWarp<Shape, T>& warp,
                                                   const TileOrigin& origin) {
  const auto& a = warp.arguments;
  const int64_t first_tile = int64_t{origin.row / Shape::kRows} * (a.tiles / a.row_tiles);
  return a.norm.sums + (first_tile * 4 + warp.warp) * kRowSums;
}

// Leaves the sums of rows lane / 4 and 8 below. Lanes of a row have the sums each.
__device__ __forceinline__ void leave_row_sums(float* of_tile, int block, const float (&of_g)[2],
                                               const float (&of_products)[2], int lane) {
  if (lane % 4 > 0) return;
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   of_tile + block * (kRowSums / 2) + lane),
               "f"(of_g[0]), "f"(of_products[0]), "f"(of_g[1]), "f"(of_products[1])
               : "memory");
}

// Adds up the sums that all tiles of a row have left of the lane's row, in the order of the
// columns, as soon as they are there. Before, they are NaNs that no arithmetic makes.
__device__ __forceinline__ float2 collect_row_sums(const float* of_first_tile, int column_tiles,
                                                   int lane) {
  const float* const mine =
      of_first_tile + lane / kBandRows * (kRowSums / 2) + lane % 8 * 4 + lane / 8 % 2 * 2;
  constexpr int kAtOnce = 4;
  float2 total = {};
  for (int first = 0; first < column_tiles; first += kAtOnce) {
    float2 sums[kAtOnce] = {};
    bool is_missing;
    do {
      is_missing = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= column_tiles) break;
        asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                     : "=f"(sums[i].x), "=f"(sums[i].y)
                     : "l"(mine + (first + i) * 4 * kRowSums)
                     : "memory");
      }
#pragma unroll
      for (const float2& sum : sums) {
        is_missing |=
            __float_as_uint(sum.x) == kMissingRowSum || __float_as_uint(sum.y) == kMissingRowSum;
      }
    } while (is_missing);
#pragma unroll
    for (const float2& sum : sums) total.x += sum.x, total.y += sum.y;
  }
  __syncwarp();
  return total;
}

// ---- What belongs to columns: sums over all rows that a warp sees. All tiles of a block have the
// same columns. Of a slab's 64 sum_over_rows gives two to each lane.

template <class Shape>
struct ColumnSums {
  float2 of_slabs[Shape::kSlabs] = {};

  __device__ __forceinline__ void add(int slab, const float (&values)[16], int lane) {
    const float2 two = sum_over_rows(values, lane);
    of_slabs[slab].x += two.x;
    of_slabs[slab].y += two.y;
  }

  // Writes those of `columns` columns.
  __device__ __forceinline__ void write(float* partial, int columns, int lane) const {
    const int j = (lane & 4) + (lane >> 2 & 2) + (lane >> 4 & 1);  // the bits of lane / 4 reversed
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      const int column = slab * kSlabWidth + 8 * j + lane % 4 * 2;
      if (column < columns) *reinterpret_cast<float2*>(partial + column) = of_slabs[slab];
    }
  }
};

template <class Shape>
struct NormColumnSums {
  ColumnSums<Shape> dscale, out;
};

// Writes a warp's sums, a row of each of two matrices of partial sums.
template <class Shape, typename T>
__device__ __forceinline__ void write_norm_sums(const BandWarp<Shape, T>& warp,
                                                const NormColumnSums<Shape>& sums, int rank) {
  const auto& a = warp.arguments;
  const int column_tiles = a.tiles / a.row_tiles;
  const int cluster = blockIdx.x / Shape::kCluster, clusters = gridDim.x / Shape::kCluster;
  constexpr int kWarps = Shape::kCluster * Shape::kMultipliers * 4;
  const int row = cluster / column_tiles * kWarps +
                  (rank * Shape::kMultipliers + warp.multiplier) * 4 + warp.warp;
  const int first = cluster % column_tiles * Shape::kColumns;
  float* const partial = a.partial + int64_t{row} * a.columns + first;
  sums.dscale.write(partial, a.columns - first, warp.lane);
  const int64_t of_one = int64_t{clusters / column_tiles} * kWarps * a.columns;
  sums.out.write(partial + of_one, a.columns - first, warp.lane);
}

// ---- The two passes.

// Makes g of the product in `sums`, and adds up its rows and columns.
template <class Shape, typename T>
__device__ __forceinline__ void sum_norm_gradient(
    BandWarp<Shape, T>& warp, const NormBands<Shape, T>& bands,
    float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2], float rstd_of_row, float shift_of_row,
    ColumnSums<Shape>& dscale) {
  const int lane = warp.lane;
  float of_g[Shape::kBlocksOf64][2] = {}, of_products[Shape::kBlocksOf64][2] = {};
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
    float of_columns[16] = {};
#pragma unroll
    for (int block = 0; block < Shape::kBlocksOf64; ++block) {
      const int band = slab * Shape::kBlocksOf64 + block, slot = band % kSlots;
      float rstd[2], shift[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rstd[half] = value_of_row(rstd_of_row, block, half, lane);
        shift[half] = value_of_row(shift_of_row, block, half, lane);
      }
      bands.wait(slot, band / kSlots);
      const uint32_t row = warp.matrix_row(warp.slot(slot));
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
        uint32_t words[4];
        load_matrices(words, row ^ 16 * first);
#pragma unroll
        for (int j = first; j < first + 2; ++j) {
          const float2 scale = warp.bias(slab, j);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = sum_index(slab, j, half);
            const float2 x = unpack<T>(words[2 * (j - first) + half]);
            float& p0 = sums[block][at];
            float& p1 = sums[block][at + 1];
            const float product0 = p0 * (x.x * rstd[half] + shift[half]);
            const float product1 = p1 * (x.y * rstd[half] + shift[half]);
            of_columns[2 * j] += product0;
            of_columns[2 * j + 1] += product1;
            of_products[block][half] += product0 * scale.x;
            of_products[block][half] += product1 * scale.y;
            p0 *= scale.x;
            p1 *= scale.y;
            of_g[block][half] += p0;
            of_g[block][half] += p1;
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        if (band + kSlots < Shape::kBands) bands.load(warp.saved_map, slot, band + kSlots);
        // The slots 2 and 3 have done their part for x.
        if (slot == band && slot >= 2) bands.load(warp.out_map, slot, Shape::kBands + 1 - slot);
      }
    }
    dscale.add(slab, of_columns, lane);
  }
  float* const of_tile =
      row_sums_of_warp(warp, bands.origin) + bands.origin.column / Shape::kColumns * 4 * kRowSums;
#pragma unroll
  for (int block = 0; block < Shape::kBlocksOf64; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        of_g[block][half] += __shfl_xor_sync(0xffffffff, of_g[block][half], lanes);
        of_products[block][half] += __shfl_xor_sync(0xffffffff, of_products[block][half], lanes);
      }
    }
    leave_row_sums(of_tile, block, of_g[block], of_products[block], lane);
  }
}

// out += rstd g + factor x + constant, where `sums` has g and the lane what belongs to its row.
template <class Shape, typename T>
__device__ __forceinline__ void add_norm_gradient(
    BandWarp<Shape, T>& warp, const NormBands<Shape, T>& bands,
    const float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2], float rstd_of_row,
    float factor_of_row, float constant_of_row, ColumnSums<Shape>& of_out) {
  const int lane = warp.lane;
#pragma unroll
  for (int slab = Shape::kSlabs - 1; slab >= 0; --slab) {
    float of_columns[16] = {};
#pragma unroll
    for (int block = Shape::kBlocksOf64 - 1; block >= 0; --block) {
      const int band = slab * Shape::kBlocksOf64 + block, turn = Shape::kBands - 1 - band;
      const int x_slot = 1 - turn % 2, out_slot = 2 + turn % 2;
      float rstd[2], factor[2], constant[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rstd[half] = value_of_row(rstd_of_row, block, half, lane);
        factor[half] = value_of_row(factor_of_row, block, half, lane);
        constant[half] = value_of_row(constant_of_row, block, half, lane);
      }
      if (turn >= 2) bands.wait(x_slot, 1 + turn / 2);
      bands.wait(out_slot, 1 + turn / 2);
      T* const slot = warp.slot(out_slot);
      const uint32_t x_row = warp.matrix_row(warp.slot(x_slot)), row = warp.matrix_row(slot);
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
        if (first == 4 && turn > 0 && band > 0 && lane == 0) {
          // By now the band before has left its slot.
          wait_until_stores_have_read();
          bands.load(warp.out_map, 5 - out_slot, band - 1);
        }
        uint32_t x_words[4], words[4];
        load_matrices(x_words, x_row ^ 16 * first);
        load_matrices(words, row ^ 16 * first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + i / 2, half = i % 2, at = sum_index(slab, j, half);
          const float2 old = unpack<T>(words[i]), x = unpack<T>(x_words[i]);
          of_columns[2 * j] += old.x;
          of_columns[2 * j + 1] += old.y;
          words[i] = pack<T>(
              old.x + (rstd[half] * sums[block][at] + (factor[half] * x.x + constant[half])),
              old.y + (rstd[half] * sums[block][at + 1] + (factor[half] * x.y + constant[half])));
        }
        store_matrices(row ^ 16 * first, words);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        store_matrix_box(warp.out_map, slot, warp.column(bands.origin, band),
                         warp.row(bands.origin, band));
        commit_stores();
        if (band >= 2) bands.load(warp.saved_map, x_slot, band - 2);
      }
    }
    of_out.add(slab, of_columns, lane);
  }
}

// Adds the gradient of the norm's input to out, where `sums` has the product p, and goes on with
// the sums of columns: of p xhat, and of out as it was. Has x of the warp's `next` tile come in
// too.
template <class Shape, typename T>
__device__ __forceinline__ void finish_norm_gradient(
    BandWarp<Shape, T>& warp, float (&sums)[Shape::kBlocksOf64][Shape::kColumns / 2],
    const RowStatistics& row, NormColumnSums<Shape>& column_sums, const TileOrigin& origin,
    const TileOrigin& next, bool has_next) {
  const auto& a = warp.arguments;
  const NormBands<Shape, T> bands{warp, origin};
  const float shift = -row.mean * row.rstd;  // xhat = rstd x + shift
  sum_norm_gradient(warp, bands, sums, row.rstd, shift, column_sums.dscale);
  const float2 total =
      collect_row_sums(row_sums_of_warp(warp, origin), a.tiles / a.row_tiles, warp.lane);
  const float mean_g = total.x / a.columns, mean_product = total.y / a.columns;
  const float factor = -row.rstd * row.rstd * mean_product;
  const float constant = -row.rstd * (mean_g + shift * mean_product);
  add_norm_gradient(warp, bands, sums, row.rstd, factor, constant, column_sums.out);
  if (has_next && warp.lane == 0) {
    wait_until_stores_have_read();
    load_first_of_x(warp, next);
  }
}

}  // namespace
}  // namespace jaxllm
