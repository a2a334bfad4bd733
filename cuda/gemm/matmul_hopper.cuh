// A matrix product on Hopper, with what follows it in a network fused into its
// end.
//
// A block has one warpgroup that copies and two that multiply, and stays until
// there are no tiles of the result left. The copier brings slices of a and b,
// 64 deep, into a ring of buffers, as far ahead as there is room; blocks of a
// cluster that need the same slice copy a part of it each, into all of them.
// The multipliers take tiles in turn: while one finishes its tile (activation,
// rounding, storing), the other has the tensor cores.
//
// A finished tile leaves through shared memory: each warp has its rows stored a
// band after the other, and so do the bands of the array that a slope is taken
// of come in, three bands ahead.
#pragma once

#include <algorithm>

#include "activation/functions.cuh"
#include "common/hopper.cuh"
#include "common/vector.cuh"
#include "gemm/hopper_matrix.cuh"
#include "gemm/matrix_map.h"

// For other GPUs the kernel is empty, and nothing uses what comes here.
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#pragma nv_diag_suppress 177
#endif

namespace jaxllm {
namespace {

using namespace hopper;

// What becomes of the product p before it is stored.
enum class Epilogue {
  kBiasGelu,   // h = p, out = gelu(p + bias)
  kGeluSlope,  // out = p gelu'(h + bias), and partial sums of its columns
};

// One call: a of (rows, depth), b turned (depth, columns) or (columns, depth),
// out and h of (rows, columns), bias of (columns).
template <typename T>
struct HopperMatmul {
  int64_t rows, columns, depth;
  const T* a;
  const T* b;
  T* out;
  const T* h;
  const T* bias;
  float* partial;
};

// How a kernel divides its work. A tile has 128 rows.
template <int kColumns_, int kStages_, int kClusterRows_, int kClusterColumns_>
struct TileShape {
  static constexpr int kColumns = kColumns_;
  static constexpr int kStages = kStages_;
  // Blocks of a cluster that have the same columns, and so the same b; and the
  // same rows and a.
  static constexpr int kClusterRows = kClusterRows_;
  static constexpr int kClusterColumns = kClusterColumns_;
  static constexpr int kCluster = kClusterRows * kClusterColumns;

  static constexpr int kMultipliers = 2;
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  static constexpr int kBlocksOf64 = 2;
  static constexpr int kRows = kBlocksOf64 * 64;
  static constexpr int kDepth = 64;
  static constexpr int kSlabs = kColumns / kSlabWidth;
  static constexpr int kBands = kBlocksOf64 * kSlabs;  // of a tile, for each warp
  static constexpr int kSlots = 4;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * 2;
  // Warps that say, in each block of the cluster, that they are done with a
  // stage.
  static constexpr int kReaders = 4 * kCluster;
  // Together the 64K registers of a multiprocessor.
  static constexpr int kCopierRegisters = 24;
  static constexpr int kMultiplierRegisters = 240;
  static_assert(kColumns % kSlabWidth == 0);
};

// Each warp finishes 16 rows of a block of 64, 64 columns at a time: a band.
constexpr int kBandRows = 16;
constexpr int kBandSize = kBandRows * kSlabWidth;

template <typename T, class Shape>
struct MatmulShared {
  T a[Shape::kStages][Shape::kRows * Shape::kDepth];
  T b[Shape::kStages][Shape::kColumns * Shape::kDepth];
  T slots[Shape::kMultipliers][4][Shape::kSlots][kBandSize];
  float sums[Shape::kMultipliers][4][kSlabWidth];  // of columns, by warp
  Barrier full[Shape::kStages], empty[Shape::kStages];
  Barrier saved[Shape::kMultipliers][4][Shape::kSlots];
  Barrier turn[Shape::kMultipliers];  // to multiply
};

template <typename T>
struct MatmulArguments {
  int rows, columns;     // of the result
  int steps;             // of kDepth
  int row_tiles, tiles;  // of a cluster
  int row_tiles_at_a_time;
  const T* bias;
  float* partial;
};

// The first row and column of a block's tile, by the number of its cluster's. A
// group of row tiles at a time, so that what the blocks at work read lies in
// the L2 cache.
struct TileOrigin {
  int row, column;
};

template <class Shape, typename T>
__device__ __forceinline__ TileOrigin decode_tile(const MatmulArguments<T>& arguments, int tile,
                                                  int rank) {
  const int column_tiles = arguments.tiles / arguments.row_tiles;
  const int first_row_tile =
      tile / (arguments.row_tiles_at_a_time * column_tiles) * arguments.row_tiles_at_a_time;
  const int row_tiles = min(arguments.row_tiles_at_a_time, arguments.row_tiles - first_row_tile);
  const int rest = tile - first_row_tile * column_tiles;
  const int row_tile = first_row_tile + rest % row_tiles, column_tile = rest / row_tiles;
  return {(row_tile * Shape::kClusterRows + rank % Shape::kClusterRows) * Shape::kRows,
          (column_tile * Shape::kClusterColumns + rank / Shape::kClusterRows) * Shape::kColumns};
}

// Copies one operand's slice of a stage: `kExtent` rows of the result for a, or
// columns for b, by kDepth. kTurned: the depth runs across the rows of the
// operand in memory. Of kShares blocks that need the slice, each copies one
// part into all of those in `blocks`.
template <int kExtent, bool kTurned, int kShares, typename T>
__device__ __forceinline__ void load_slice(T* target, const CUtensorMap& map, int first, int depth,
                                           int share, uint16_t blocks, const Barrier& full) {
  constexpr int kBoxRows = (kTurned ? 64 : kExtent) / kShares;
  constexpr int kBoxes = kTurned ? kExtent / kSlabWidth : 1;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    T* const to = target + (box * 64 + share * kBoxRows) * kSlabWidth;
    const int column = kTurned ? first + box * kSlabWidth : depth;
    const int row = (kTurned ? depth : first) + share * kBoxRows;
    if constexpr (kShares == 1) {
      load_matrix_box(to, map, column, row, full);
    } else {
      load_matrix_box(to, map, column, row, full, blocks);
    }
  }
}

template <class Shape, bool kTurnB, typename T>
__device__ __forceinline__ void copy_operands(MatmulShared<T, Shape>& shared,
                                              const MatmulArguments<T>& arguments,
                                              const CUtensorMap& a_map, const CUtensorMap& b_map,
                                              int rank) {
  const int rank_row = rank % Shape::kClusterRows, rank_column = rank / Shape::kClusterRows;
  uint16_t same_rows = 0,
           same_columns = 0;  // the blocks that need the same a, and the same b
  for (int i = 0; i < Shape::kClusterColumns; ++i) {
    same_rows |= 1 << (rank_row + i * Shape::kClusterRows);
  }
  for (int i = 0; i < Shape::kClusterRows; ++i) {
    same_columns |= 1 << (i + rank_column * Shape::kClusterRows);
  }
  RingPosition<Shape::kStages> ring;
  const int clusters = gridDim.x / Shape::kCluster;
  for (int tile = blockIdx.x / Shape::kCluster; tile < arguments.tiles; tile += clusters) {
    const TileOrigin origin = decode_tile<Shape>(arguments, tile, rank);
#pragma unroll 1
    for (int step = 0; step < arguments.steps; ++step) {
      const int depth = step * Shape::kDepth;
      Barrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.parity ^ 1);
      full.arrive_and_expect(Shape::kStageBytes);
      load_slice<Shape::kRows, false, Shape::kClusterColumns>(
          shared.a[ring.stage], a_map, origin.row, depth, rank_column, same_rows, full);
      load_slice<Shape::kColumns, kTurnB, Shape::kClusterRows>(
          shared.b[ring.stage], b_map, origin.column, depth, rank_row, same_columns, full);
      ring.advance();
    }
  }
}

// Adds 16 values over the eight lanes whose numbers are equal modulo 4, in
// fixed order. Returns two of the sums: those of values 2 i and 2 i + 1, where
// i = lane / 4 with its bits reversed.
__device__ __forceinline__ float2 sum_over_rows(const float (&values)[16], int lane) {
  float eight[8], four[4], two[2];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float keep = lane & 4 ? values[i + 8] : values[i];
    const float give = lane & 4 ? values[i] : values[i + 8];
    eight[i] = keep + __shfl_xor_sync(0xffffffff, give, 4);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float keep = lane & 8 ? eight[i + 4] : eight[i];
    const float give = lane & 8 ? eight[i] : eight[i + 4];
    four[i] = keep + __shfl_xor_sync(0xffffffff, give, 8);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = lane & 16 ? four[i + 2] : four[i];
    const float give = lane & 16 ? four[i] : four[i + 2];
    two[i] = keep + __shfl_xor_sync(0xffffffff, give, 16);
  }
  return {two[0], two[1]};
}

__device__ __forceinline__ float2 unpack(uint32_t word, __nv_bfloat16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t word, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}

constexpr int kAtOnce = 4;  // of the eight pairs of columns of a band

// GELU and its slope for results that are rounded to T. For bfloat16 the
// hardware's tanh does, to 2^-11: one instruction of the unit for special
// functions instead of two.
template <typename T>
__device__ __forceinline__ float gelu_rounded(float x) {
  if constexpr (!std::is_same_v<T, __nv_bfloat16>) return gelu(x);
  float t;
  asm("tanh.approx.f32 %0, %1;"
      : "=f"(t)
      : "f"(x * (0.5f * kGeluLinear + 0.5f * kGeluCubic * x * x)));
  const float half = 0.5f * x;
  return half + half * t;
}

template <typename T>
__device__ __forceinline__ float gelu_slope_rounded(float x) {
  if constexpr (!std::is_same_v<T, __nv_bfloat16>) return gelu_slope(x);
  const float square = fminf(x * x, 900.0f);  // out there the slope is 0 or 1
  float t;
  asm("tanh.approx.f32 %0, %1;"
      : "=f"(t)
      : "f"(x * (0.5f * kGeluLinear + 0.5f * kGeluCubic * square)));
  return (0.5f + 0.5f * t) +
         x * (1.0f - t * t) * (0.25f * kGeluLinear + 0.75f * kGeluCubic * square);
}
constexpr int kMultiplierBarrier = 1;  // + multiplier: a named barrier of its threads

// The lane's two elements of a band in the eight columns from 8 j on: it has
// rows lane / 4 and, in the half 1, 8 further.
template <typename T>
__device__ __forceinline__ uint32_t* band_word(T* band, int lane, int j, int half) {
  const uint32_t offset =
      (lane / 4 + half * 8) * kSlabRowBytes + (j ^ lane / 4) * 16 + lane % 4 * 4;
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(band) + offset);
}

// One lane's task: has a band of h copied into a slot.
template <class Shape, typename T>
__device__ __forceinline__ void load_band(MatmulShared<T, Shape>& shared, const CUtensorMap& h_map,
                                          int multiplier, int warp, int slot,
                                          const TileOrigin& origin, int band) {
  Barrier& saved = shared.saved[multiplier][warp][slot];
  saved.arrive_and_expect(kBandSize * sizeof(T));
  load_matrix_box(shared.slots[multiplier][warp][slot], h_map,
                  origin.column + band / Shape::kBlocksOf64 * kSlabWidth,
                  origin.row + band % Shape::kBlocksOf64 * 64 + warp * kBandRows, saved);
}

template <class Shape, Epilogue kEpilogue, bool kTurnB, typename T>
__device__ __forceinline__ void multiply_tiles(MatmulShared<T, Shape>& shared,
                                               const MatmulArguments<T>& arguments,
                                               const CUtensorMap& out_map, const CUtensorMap& h_map,
                                               int rank, int multiplier) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32,
            warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int clusters = gridDim.x / Shape::kCluster;
  const auto synchronise = [&] { named_barrier_sync(kMultiplierBarrier + multiplier, kWarpgroup); };

  float sums[Shape::kBlocksOf64][Shape::kColumns / 2];
  RingPosition<Shape::kStages> ring;
  RingPosition<Shape::kSlots> slot_ring;
  const auto skip_tile = [&] {
    const int position = ring.stage + arguments.steps;
    ring.parity ^= position / Shape::kStages & 1;
    ring.stage = position % Shape::kStages;
  };
  const auto release = [&](int stage) {
    __syncwarp();
    if constexpr (Shape::kCluster == 1) {
      if (lane == 0) shared.empty[stage].arrive();
    } else {
      if (lane < Shape::kCluster) arrive_at(shared.empty[stage], lane);
    }
  };

  // The first has had its turn passed to it, so to speak, by the phase before
  // the first.
  uint32_t turn_parity = multiplier == 0;
  int tile = blockIdx.x / Shape::kCluster;
  if (multiplier == 1) {
    tile += clusters;
    skip_tile();
  }
  TileOrigin next = decode_tile<Shape>(arguments, tile, rank);
  if (kEpilogue == Epilogue::kGeluSlope && tile < arguments.tiles && lane == 0) {
    for (int band = 0; band < Shape::kSlots - 1; ++band) {
      load_band(shared, h_map, multiplier, warp, band, next, band);
    }
  }
  for (; tile < arguments.tiles; tile += Shape::kMultipliers * clusters) {
    const TileOrigin origin = next;
    const int next_tile = tile + Shape::kMultipliers * clusters;
    next = decode_tile<Shape>(arguments, next_tile, rank);
    uint32_t biases[Shape::kSlabs] = {};
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      const int column = origin.column + slab * kSlabWidth + 2 * lane;
      if (column < arguments.columns) {
        biases[slab] = __ldg(reinterpret_cast<const uint32_t*>(arguments.bias + column));
      }
    }
    // Also because a barrier tells only the present phase from the one before:
    // who waits at a stage must not be further ahead.
    shared.turn[multiplier].wait(turn_parity);
    turn_parity ^= 1;
    int last_stage = 0;
#pragma unroll 1
    for (int step = 0; step < arguments.steps; ++step) {
      shared.full[ring.stage].wait(ring.parity);
      const uint32_t a_address = shared_address(shared.a[ring.stage]);
      const uint32_t b_address = shared_address(shared.b[ring.stage]);
      const uint64_t a_operand = depth_along_rows(a_address);
      const uint64_t b_operand =
          kTurnB ? depth_across_rows(b_address, 64 * kSlabRowBytes) : depth_along_rows(b_address);
      constexpr uint32_t kStepA = kDepthStepAlongRows >> 4;
      constexpr uint32_t kStepB = (kTurnB ? kDepthStepAcrossRows : kDepthStepAlongRows) >> 4;
      fence_products();
#pragma unroll
      for (int part = 0; part < Shape::kDepth / 16; ++part) {
#pragma unroll
        for (int block = 0; block < Shape::kBlocksOf64; ++block) {
          multiply<T, 0, kTurnB>(sums[block],
                                 a_operand + part * kStepA + block * (64 * kSlabRowBytes >> 4),
                                 b_operand + part * kStepB, step > 0 || part > 0);
        }
      }
      commit_products();
      // The products of the step before are done: those of this one follow them
      // without a gap.
      wait_for_products<1>(sums[0], sums[1]);
      if (step > 0) release(last_stage);
      last_stage = ring.stage;
      ring.advance();
    }
    if (thread == 0) shared.turn[multiplier ^ 1].arrive();
    wait_for_products<0>(sums[0], sums[1]);
    release(last_stage);
    skip_tile();

    float column_sums[16];
#pragma unroll
    for (int band = 0; band < Shape::kBands; ++band) {
      const int slab = band / Shape::kBlocksOf64, block = band % Shape::kBlocksOf64;
      const int column = origin.column + slab * kSlabWidth;
      const int row = origin.row + block * 64 + warp * kBandRows;
      T(*const slots)[kBandSize] = shared.slots[multiplier][warp];
      int slot = 0;
      if constexpr (kEpilogue == Epilogue::kGeluSlope) {
        slot = slot_ring.stage;
        shared.saved[multiplier][warp][slot].wait(slot_ring.parity);
        slot_ring.advance();
      } else {
        slot = band % 2 * 2;
        if (lane == 0) wait_until_older_stores_have_read<1>();
        __syncwarp();
      }
      uint32_t saved[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (kEpilogue == Epilogue::kGeluSlope && j % kAtOnce == 0) {
#pragma unroll
          for (int k = j; k < j + kAtOnce; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
              saved[k][half] = *band_word(slots[slot], lane, k, half);
          }
        }
        const float2 bias = unpack(__shfl_sync(0xffffffff, biases[slab], 4 * j + lane % 4), T{});
        float2 total = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 4 * (8 * slab + j) + 2 * half;
          const float2 sum = {sums[block][i], sums[block][i + 1]};
          if constexpr (kEpilogue == Epilogue::kBiasGelu) {
            *band_word(slots[slot], lane, j, half) = pack<T>(sum.x, sum.y);
            *band_word(slots[slot + 1], lane, j, half) =

                pack<T>(gelu_rounded<T>(sum.x + bias.x), gelu_rounded<T>(sum.y + bias.y));
          } else {
            const float2 h = unpack(saved[j][half], T{});
            const float2 dh = {sum.x * gelu_slope_rounded<T>(h.x + bias.x),
                               sum.y * gelu_slope_rounded<T>(h.y + bias.y)};
            *band_word(slots[slot], lane, j, half) = pack<T>(dh.x, dh.y);
            total.x += dh.x;
            total.y += dh.y;
          }
        }
        if (block == 0) {
          column_sums[2 * j] = total.x;
          column_sums[2 * j + 1] = total.y;
        } else {
          column_sums[2 * j] += total.x;
          column_sums[2 * j + 1] += total.y;
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        if constexpr (kEpilogue == Epilogue::kBiasGelu) {
          store_matrix_box(h_map, slots[slot], column, row);
          store_matrix_box(out_map, slots[slot + 1], column, row);
          commit_stores();
        } else {
          store_matrix_box(out_map, slots[slot], column, row);
          commit_stores();
          // The band before this one has left its slot.
          constexpr int kAhead = Shape::kSlots - 1;
          wait_until_older_stores_have_read<1>();
          const int free_slot = (slot + kAhead) % Shape::kSlots;
          if (band + kAhead < Shape::kBands) {
            load_band(shared, h_map, multiplier, warp, free_slot, origin, band + kAhead);
          } else if (next_tile < arguments.tiles) {
            load_band(shared, h_map, multiplier, warp, free_slot, next,
                      band + kAhead - Shape::kBands);
          }
        }
      }
      __syncwarp();
      if constexpr (kEpilogue == Epilogue::kGeluSlope) {
        if (block == Shape::kBlocksOf64 - 1) {
          const float2 two = sum_over_rows(column_sums, lane);
          const int j = (lane & 4) + (lane >> 2 & 2) + (lane >> 4 & 1);
          const int in_slab = 8 * j + lane % 4 * 2;
          auto& of_warps = shared.sums[multiplier];
          *reinterpret_cast<float2*>(&of_warps[warp][in_slab]) = two;
          synchronise();
          const int mine = column + thread;
          if (thread < kSlabWidth && mine < arguments.columns && origin.row < arguments.rows) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) sum += of_warps[w][thread];
            const int64_t partial_row = origin.row / Shape::kRows;
            arguments.partial[partial_row * arguments.columns + mine] = sum;
          }
          synchronise();
        }
      }
    }
  }
  if (lane == 0) wait_for_stores();
}

template <class Shape, Epilogue kEpilogue, bool kTurnB, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matmul_hopper_kernel(const __grid_constant__ CUtensorMap a_map,
                         const __grid_constant__ CUtensorMap b_map,
                         const __grid_constant__ CUtensorMap out_map,
                         const __grid_constant__ CUtensorMap h_map,
                         const __grid_constant__ MatmulArguments<T> arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<MatmulShared<T, Shape>*>(shared_memory);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(a_map);
    prefetch_tensor_map(b_map);
    prefetch_tensor_map(out_map);
    prefetch_tensor_map(h_map);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(Shape::kReaders);
    }
    for (int multiplier = 0; multiplier < Shape::kMultipliers; ++multiplier) {
      shared.turn[multiplier].init(1);
      for (int warp = 0; warp < 4; ++warp) {
        for (int slot = 0; slot < Shape::kSlots; ++slot)
          shared.saved[multiplier][warp][slot].init(1);
      }
    }
    fence_barrier_init();
  }
  if constexpr (Shape::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  const int rank = blockIdx.x % Shape::kCluster;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    give_registers<Shape::kCopierRegisters>();
    if (threadIdx.x == 0) copy_operands<Shape, kTurnB>(shared, arguments, a_map, b_map, rank);
    __syncwarp();
  } else {
    take_registers<Shape::kMultiplierRegisters>();
    multiply_tiles<Shape, kEpilogue, kTurnB>(shared, arguments, out_map, h_map, rank, warp / 4 - 1);
  }
  // Nobody leaves while another block of the cluster may still write to its
  // shared memory.
  if constexpr (Shape::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
#endif
}

// A block a multiprocessor, which takes tiles until there are none.
template <class Shape, Epilogue kEpilogue, bool kTurnB, typename T>
cudaError_t launch_matmul(cudaStream_t stream, const HopperMatmul<T>& call,
                          int row_tiles_at_a_time) {
  const auto kernel = matmul_hopper_kernel<Shape, kEpilogue, kTurnB, T>;
  constexpr int kBytes = sizeof(MatmulShared<T, Shape>);
  static_assert(kBytes <= 232448);
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int device = 0, major = 0, multiprocessors = 0;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return cudaErrorNotSupported;
  // Built for sm_90 or less the kernel has an empty body, which needs next to
  // no registers.
  cudaFuncAttributes attributes;
  JAXLLM_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.numRegs < 64) return cudaErrorNotSupported;
  JAXLLM_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  JAXLLM_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));

  const int64_t rows = call.rows, columns = call.columns, depth = call.depth;
  CUtensorMap a_map, b_map, out_map, h_map;
  const Matrix b = kTurnB ? Matrix{call.b, depth, columns} : Matrix{call.b, columns, depth};
  JAXLLM_RETURN_IF_ERROR(encode_matrix_map({call.a, rows, depth}, kType,
                                           Shape::kRows / Shape::kClusterColumns, &a_map));
  JAXLLM_RETURN_IF_ERROR(
      encode_matrix_map(b, kType, (kTurnB ? 64 : Shape::kColumns) / Shape::kClusterRows, &b_map));
  JAXLLM_RETURN_IF_ERROR(encode_matrix_map({call.out, rows, columns}, kType, kBandRows, &out_map));
  JAXLLM_RETURN_IF_ERROR(encode_matrix_map({call.h, rows, columns}, kType, kBandRows, &h_map));

  const int64_t row_tiles = divide_up(rows, Shape::kRows * Shape::kClusterRows);
  const int64_t tiles = row_tiles * divide_up(columns, Shape::kColumns * Shape::kClusterColumns);
  if (tiles >= int64_t{1} << 30) return cudaErrorNotSupported;
  const MatmulArguments<T> arguments{static_cast<int>(rows),
                                     static_cast<int>(columns),
                                     static_cast<int>(divide_up(depth, Shape::kDepth)),
                                     static_cast<int>(row_tiles),
                                     static_cast<int>(tiles),
                                     row_tiles_at_a_time,
                                     call.bias,
                                     call.partial};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {Shape::kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = multiprocessors / Shape::kCluster;
  if (Shape::kCluster > 1) {
    // Not every multiprocessor has a neighbour to form a cluster with.
    config.gridDim = clusters * Shape::kCluster;
    JAXLLM_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    if (clusters == 0) return cudaErrorNotSupported;
  }
  config.gridDim = static_cast<unsigned>(std::min<int64_t>(tiles, clusters)) * Shape::kCluster;
  return cudaLaunchKernelEx(&config, kernel, a_map, b_map, out_map, h_map, arguments);
}

}  // namespace
}  // namespace jaxllm
