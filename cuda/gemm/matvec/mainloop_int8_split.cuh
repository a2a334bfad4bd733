// GEMV of int8 weights and one or two rows of x, on int8 tensor cores (Ozaki-style split of x).
//
// The int8 split applies to x, because the weights are so much longer: they go from memory to the
// tensor cores as they are. Each group of 64 elements of x becomes integers of 23 bits, in units of
// a power of two that its largest element sets. An integer is three int8 parts:
//
//   x = unit * (65536 * high + 256 * middle + low)
//
// The parts are columns of the MMA's `b`, and the int32 sums of 64 products are exact. What is lost
// is less than half a unit: 2^-23 of the power of two above the largest element.
#pragma once

#include "common/barrier.cuh"
#include "common/dependent_launch.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "gemm/matvec/pipeline.cuh"

namespace jaxllm {

constexpr int kSplitWarps = 16, kSplitStages = 4, kSplitRows = 2;

// The split of x in shared memory: for each row an array of high, one of middle and one of low
// parts, and then the units. Arrays are half the banks apart, because a load takes from two at
// once. Within a group of 64 the words of four columns are transposed, so that lane c loads words
// c, c + 4, c + 8 and c + 12 with one instruction:
//
//   columns   0-3  4-7  8-11  12-15  16-19  20-23  ...
//   byte      0    16   32    48     4      20     ...
struct Int8Split {
  __host__ __device__ static int padded(int64_t width) { return (width + 127) / 128 * 128; }
  __host__ __device__ static int64_t bytes(int64_t width, int64_t rows) {
    return rows * (3 * (padded(width) + 64) + padded(width) / 64 * sizeof(float));
  }

  __device__ Int8Split(char* smem, int width, int rows)
      : parts(smem), part_bytes(padded(width) + 64), groups(padded(width) / 64) {
    units = reinterpret_cast<float*>(parts + 3 * rows * part_bytes);
  }
  __device__ char* part(int row, int i) const { return parts + (row * 3 + i) * part_bytes; }

  char* parts;
  float* units;
  int part_bytes, groups;
};

// Splits eight elements; eight neighbouring threads have a group. An element that is not finite
// makes all of its group NaN.
__device__ __forceinline__ void split_int8(const float (&values)[8], const Int8Split& split,
                                           int row, int column, bool is_inside) {
  uint32_t largest = 0;  // as bits, where NaN is above infinity
#pragma unroll
  for (int j = 0; j < 8; ++j) largest = max(largest, __float_as_uint(values[j]) & 0x7fffffffu);
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  if (!is_inside) return;
  // All are below 2^(exponent - 127), and become integers below 2^22.
  const uint32_t exponent = max(largest >> 23, 22u) + 1;
  const float to_integer = __uint_as_float((276 - exponent) << 23);
  uint32_t words[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // Adding 1.5 * 2^23 rounds, and leaves the integer in the last bits. Adding 128 to each byte
    // carries what a negative part borrows; flipping its top bit subtracts the 128 again.
    const uint32_t rounded = __float_as_uint(values[j] * to_integer + 12582912.0f) - 0x4b400000u;
    words[j] = (rounded + 0x808080u) ^ 0x808080u;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t selector = (2 - i) | (6 - i) << 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int word = column / 4 % 16 + h;
      char* target = split.part(row, i) + column / 64 * 64 + word % 4 * 16 + word / 4 * 4;
      *reinterpret_cast<uint32_t*>(target) =
          __byte_perm(__byte_perm(words[4 * h], words[4 * h + 1], selector),
                      __byte_perm(words[4 * h + 2], words[4 * h + 3], selector), 0x5410);
    }
  }
  if (column % 64 == 0) {
    const bool is_finite = largest < 0x7f800000u;
    split.units[row * split.groups + column / 64] =
        __uint_as_float(is_finite ? (exponent - 22) << 23 : 0x7fc00000u);
  }
}

// Splits x times the norm's scale; `squares` gets each warp's share of a row's sum of squares.
// `after_loads` is called once, when the first loads are in flight.
template <typename T, class AfterLoads>
__device__ void split_rows(const MatvecParams<T, int8_t>& p, const Int8Split& split,
                           float (*squares)[kSplitWarps], const AfterLoads& after_loads) {
  constexpr int kHeld = 4, kThreads = 32 * kSplitWarps;
  const int width = p.width, rows = p.rows, row_packs = split.groups * 8;
  float sums[kSplitRows] = {};
  for (int first = 0; first < rows * row_packs; first += kHeld * kThreads) {
    Pack<T, 8> held[kHeld] = {};
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = first + h * kThreads + threadIdx.x, row = i >= row_packs;
      const int column = (i - row * row_packs) * 8;
      if (row < rows && column < width) held[h] = load<8>(p.x + row * width + column);
    }
    if (first == 0) after_loads();
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = first + h * kThreads + threadIdx.x, row = i >= row_packs;
      const int column = (i - row * row_packs) * 8;
      if (i - static_cast<int>(threadIdx.x) % 32 >= rows * row_packs) break;
      float values[8], square = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] = held[h][j];
        square += values[j] * values[j];
      }
      sums[0] += row == 0 ? square : 0.0f;
      sums[1] += row == 0 ? 0.0f : square;
      if (p.norm != nullptr && column < width) {
        const Pack<T, 8> scale = load_cached<8>(p.norm + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] *= scale[j];
      }
      split_int8(values, split, row, column, i < rows * row_packs);
    }
  }
  if (p.norm == nullptr) return;
  sum_over_lanes<32>(sums);
  if (threadIdx.x % 32 == 0) {
    squares[0][threadIdx.x / 32] = sums[0];
    squares[1][threadIdx.x / 32] = sums[1];
  }
}

// A CTA works on kSplitWarps / slices tiles at once, `slices` warps each, a power of two. Column n
// of the MMA's `b` is part n % 4 of row n / 4 of x; there is no fourth part. So lane 4 r + c loads
// column r, and accumulates columns 2 c and 2 c + 1, two parts of row c / 2 of x, for rows r and
// r + 8 of a tile.
template <typename T, class Epilogue>
__global__ void __launch_bounds__(32 * kSplitWarps, 1)
    matvec_int8_split_kernel(const MatvecParams<T, int8_t> p, const Epilogue epilogue, int slices) {
  __shared__ float partial[2][kSplitWarps][kSplitRows][16];
  __shared__ float squares[kSplitRows][kSplitWarps];
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int rows = p.rows, slot = warp / slices;  // of the CTA's tiles at once
  MatvecStage* stages = reinterpret_cast<MatvecStage*>(smem);
  const Int8Split split(reinterpret_cast<char*>(stages + kSplitWarps * kSplitStages), p.width,
                        rows);
  launch_dependent_grids();
  const int ctas = gridDim.x;
  const KSlice slice = {slot * ctas + static_cast<int>(blockIdx.x), kSplitWarps / slices * ctas,
                        warp % slices, slices};
  MatvecPipeline<kSplitStages, MatvecParams<T, int8_t>, Epilogue> pipeline(
      p, epilogue, slice, stages + warp * kSplitStages);
  wait_on_dependent_grids();
  split_rows(p, split, squares, [&] { pipeline.fill(); });
  __syncthreads();

  const int thread = slice.slice * 32 + lane;  // of the slot; it stores pair thread % 8
  const int stored_row = thread / kTilePairs;
  float rstd_of_row = 1.0f;
  if (p.norm != nullptr && stored_row < rows)
    rstd_of_row = rstd(p, squares[stored_row], kSplitWarps);
  const bool has_part = r % 4 < 3 && r / 4 < rows;
  const char* part = split.part(has_part ? r / 4 : 0, has_part ? r % 4 : 0) + c * 16;
  const float* units = split.units + (c / 2 < rows ? c / 2 : 0) * split.groups;
  const int offset = MatvecStage::offset(lane % 16, lane / 16);

  int buffer = 0;
  for (int tile = slice.first_tile; tile < pipeline.tiles; tile += slice.tile_stride, buffer ^= 1) {
    float sums[2] = {};  // of rows r and r + 8
    for (int k_block = slice.slice; k_block < pipeline.k_blocks; k_block += slice.slices) {
      const MatvecStage& stage = pipeline.next();
      const float2 unit = *reinterpret_cast<const float2*>(units + 2 * k_block);
      const float2 low = *reinterpret_cast<const float2*>(stage.scales[r]);
      const float2 high = *reinterpret_cast<const float2*>(stage.scales[r + 8]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 x = {0, 0, 0, 0};
        if (has_part) x = *reinterpret_cast<const uint4*>(part + k_block * 128 + half * 64);
        int products[4] = {};
        uint32_t weights[4];
        ldmatrix(weights, smem_address(stage.bytes + (offset ^ half * 64)));
        mma_m16n8k32_int8(products, weights, x.x, x.y);
        ldmatrix(weights, smem_address(stage.bytes + (offset ^ half * 64 ^ 32)));
        mma_m16n8k32_int8(products, weights, x.z, x.w);
        const float scale = half == 0 ? unit.x : unit.y;
        sums[0] += scale * (half == 0 ? low.x : low.y) * (products[0] * 256 + products[1]);
        sums[1] += scale * (half == 0 ? high.x : high.y) * (products[2] * 256 + products[3]);
      }
    }
    // Even lanes have 256 * high + middle. Odd lanes have 256 * low: their other column is zero.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h] *= c % 2 == 0 ? 256.0f : 1.0f / 256.0f;
      sums[h] += __shfl_xor_sync(kFullWarp, sums[h], 1);
      if (c % 2 == 0) partial[buffer][warp][c / 2][r + 8 * h] = sums[h];
    }
    hopper::named_barrier_sync(slot, 32 * slices);
    const int64_t pair = int64_t{tile} * kTilePairs + thread % kTilePairs;
    if (stored_row >= rows || pair >= epilogue.pairs()) continue;
    float first = 0.0f, second = 0.0f;
    for (int w = 0; w < slices; ++w) {
      const float* share = partial[buffer][slot * slices + w][stored_row];
      first += share[thread % kTilePairs];
      second += share[thread % kTilePairs + kTilePairs];
    }
    epilogue.store(pair, stored_row, first * rstd_of_row, second * rstd_of_row);
  }
}

// The warps of a tile. A CTA has as many slots as tiles, so that all slots do the same. But a slot
// has at least two warps, since one cannot keep enough copies in flight, and each warp two
// K-blocks.
inline int split_k_slices(int64_t tiles_per_cta, int64_t k_blocks) {
  int slices = kSplitWarps;
  while (slices > 2 && (2 * kSplitWarps / slices <= tiles_per_cta || 2 * slices > k_blocks)) {
    slices /= 2;
  }
  return slices;
}

}  // namespace jaxllm
