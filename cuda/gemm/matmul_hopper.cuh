// A matrix product on Hopper, with what follows it in a network fused into its end.
//
// A block has one warpgroup that copies and two that multiply, and stays until there are no tiles
// of the result left. The copier brings slices of a and b, 64 deep, into a ring of buffers, as far
// ahead as there is room; blocks of a cluster that need the same slice copy a part of it each, into
// all of them. The multipliers take tiles in turn: while one finishes its tile (activation,
// rounding, storing), the other has the tensor cores.
//
// gemm/matmul_tiles.cuh has the tiles and the copier, gemm/matmul_bands.cuh the end of a tile, and
// gemm/matmul_slopes.cuh, gemm/matmul_norm.cuh, gemm/matmul_norm_gradient.cuh,
// gemm/matmul_head_sums.cuh and gemm/matmul_softmax.cuh that of the products that GELU's slope goes
// from and to, of those before a norm and before its gradient, of the one before attention's
// backward, and of the head's.
#pragma once

#include <algorithm>
#include <climits>

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/hopper_launch.h"
#include "common/tensor_map.h"
#include "gemm/matmul_bands.cuh"
#include "gemm/matmul_head_sums.cuh"
#include "gemm/matmul_norm.cuh"
#include "gemm/matmul_norm_gradient.cuh"
#include "gemm/matmul_slopes.cuh"
#include "gemm/matmul_softmax.cuh"
#include "gemm/matmul_tiles.cuh"

// For other GPUs the kernel is empty, and nothing uses what comes here.
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#pragma nv_diag_suppress 177
#endif

namespace jaxllm {
namespace {

// What becomes of the product p before it is stored.
enum class Epilogue {
  kBias,       // out = p + bias
  kWide,       // the same in float32
  kGelu,       // out = gelu(p + bias), saved = p
  kGeluSlope,  // out = gelu(p + bias), slopes = gelu'(p + bias)
  kScale,      // out = p slopes, and partial sums of its columns
  kResidual,   // out = p + bias + saved
  kHeadSums,   // out = p, sums of p saved over each 64 columns, and partial sums of p's columns
  kNorm,       // out = the layer norm, without scale and bias, of p + bias + saved / rstd
  // out += the gradient of a layer norm's input, where p is that of its output without scale and
  // bias, and partial sums of the columns of out as it was
  kNormGradient,
  kSoftmax,  // out = e^(p - the row's shift), and their sums over the columns of a tile
};

// One call: a of (rows, depth) or turned (depth, rows), b turned (depth, columns) or (columns,
// depth), out and saved of (rows, columns), bias of (columns).
template <typename T>
struct HopperMatmul {
  int64_t rows, columns, depth;
  const T* a;
  const T* b;
  T* out;
  const T* saved;
  const T* bias;  // null for none
  float* partial;
  float* wide_out = nullptr;  // in the place of out
  T* slopes = nullptr;        // in the place of saved
  float* head_sums = nullptr;
  int64_t tokens = 0;
  SoftmaxRows softmax = {};
  NormRows norm = {};
  int64_t most_clusters = INT_MAX;  // for which `partial` has room
  int* clusters = nullptr;          // where to tell how many there are
};

// How many bands of an array of the result's shape a tile begins with; none if it reads no such.
template <Epilogue kEpilogue>
constexpr int kFirstSaved =
    kEpilogue == Epilogue::kResidual || kEpilogue == Epilogue::kHeadSums   ? kBandsAhead
    : kEpilogue == Epilogue::kNorm || kEpilogue == Epilogue::kNormGradient ? kSlots
                                                                           : 0;

// Whether the product is added to the biases, and none are left for the end of a tile.
template <Epilogue kEpilogue>
constexpr bool kBeginsWithBiases =
    kEpilogue == Epilogue::kBias || kEpilogue == Epilogue::kGeluSlope ||
    kEpilogue == Epilogue::kResidual || kEpilogue == Epilogue::kNorm;

// Whether the tiles of a row wait for one another.
template <Epilogue kEpilogue>
constexpr bool kSumsRows = kEpilogue == Epilogue::kNorm || kEpilogue == Epilogue::kNormGradient;

template <class Shape, Epilogue kEpilogue, bool kTurnA, bool kTurnB, typename T>
__device__ __forceinline__ void multiply_tiles(MatmulShared<T, Shape>& shared,
                                               const MatmulArguments<T>& arguments,
                                               const CUtensorMap& out_map,
                                               const CUtensorMap& saved_map, int rank,
                                               int multiplier) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int clusters = gridDim.x / Shape::kCluster;
  BandWarp<Shape, T> warp{shared,    arguments,  out_map,
                          saved_map, multiplier, __shfl_sync(0xffffffff, thread / 32, 0),
                          lane};
  PipelineState<Shape::kStages> ring;
  const auto skip_tile = [&] {
    const int position = ring.stage + arguments.steps;
    ring.phase ^= position / Shape::kStages & 1;
    ring.stage = position % Shape::kStages;
  };
  const auto release_last = [&] {
    const int stage = (ring.stage == 0 ? Shape::kStages : ring.stage) - 1;
    __syncwarp();
    if constexpr (Shape::kCluster == 1) {
      if (lane == 0) shared.empty[stage].arrive();
    } else {
      if (lane < Shape::kCluster) arrive_remote(shared.empty[stage], lane);
    }
  };

  // The first has had its turn passed to it, so to speak, by the phase before the first.
  uint32_t turn_parity = multiplier == 0;
  int tile = blockIdx.x / Shape::kCluster;
  if (multiplier == 1) {
    tile += clusters;
    skip_tile();
  }
  if constexpr (kFirstSaved<kEpilogue> > 0) {
    if (tile < arguments.tiles) {
      load_first_saved<kFirstSaved<kEpilogue>>(warp, decode_tile<Shape>(arguments, tile, rank));
    }
  }
  ColumnSums<Shape> sums_of_out;
  while (tile < arguments.tiles) {
    const TileOrigin origin = decode_tile<Shape>(arguments, tile, rank);
    warp.load_biases(origin);
    float rstd = 0.0f;
    if constexpr (kSumsRows<kEpilogue>) rstd = load_rstd(warp, origin);

    float sums[Shape::kBlocksOf64][Shape::kColumns / 2];
    // A product that need not add would do without these zeros, but the compiler cannot tell that
    // it does not read them: it would keep all sums of a tile until the next, and have few
    // registers to finish the tile with.
    if constexpr (kBeginsWithBiases<kEpilogue>) {
      begin_with_biases(warp, sums);
    } else {
#pragma unroll
      for (auto& of_block : sums) {
#pragma unroll
        for (float& sum : of_block) sum = 0.0f;
      }
    }
    warpgroup_fence_operand(sums[0]);
    warpgroup_fence_operand(sums[1]);
    // Also because a barrier tells only the present phase from the one before: who waits at a
    // stage must not be further ahead.
    shared.turn[multiplier].wait(turn_parity);
    turn_parity ^= 1;
#pragma unroll 1
    for (int step = 0; step < arguments.steps; ++step) {
      shared.full[ring.stage].wait(ring.phase);
      const uint32_t a_address = smem_address(shared.a[ring.stage]);
      const uint32_t b_address = smem_address(shared.b[ring.stage]);
      const uint64_t a_operand = kTurnA ? mn_major_descriptor(a_address, 64 * kSwizzleRowBytes)
                                        : k_major_descriptor(a_address);
      const uint64_t b_operand = kTurnB ? mn_major_descriptor(b_address, 64 * kSwizzleRowBytes)
                                        : k_major_descriptor(b_address);
      constexpr uint32_t kStepA = (kTurnA ? kMnMajorStepBytes : kKMajorStepBytes) >> 4;
      constexpr uint32_t kStepB = (kTurnB ? kMnMajorStepBytes : kKMajorStepBytes) >> 4;
      warpgroup_arrive();
#pragma unroll
      for (int part = 0; part < Shape::kDepth / 16; ++part) {
#pragma unroll
        for (int block = 0; block < Shape::kBlocksOf64; ++block) {
          wgmma<T, kTurnA ? Major::kMN : Major::kK, kTurnB ? Major::kMN : Major::kK>(
              sums[block], a_operand + part * kStepA + block * (64 * kSwizzleRowBytes >> 4),
              b_operand + part * kStepB, true);
        }
      }
      warpgroup_commit_batch();
      // The products of the step before are done: those of this one follow them without a gap.
      warpgroup_wait<1>(sums[0], sums[1]);
      if (step > 0) release_last();
      ring.advance();
    }
    if (thread == 0) shared.turn[multiplier ^ 1].arrive();
    warpgroup_wait<0>(sums[0], sums[1]);
    release_last();
    skip_tile();

    tile += Shape::kMultipliers * clusters;
    const TileOrigin next = decode_tile<Shape>(arguments, tile, rank);
    if constexpr (kEpilogue == Epilogue::kBias) {
      finish_bias(warp, sums, origin);
    } else if constexpr (kEpilogue == Epilogue::kWide) {
      finish_wide(warp, sums, origin);
    } else if constexpr (kEpilogue == Epilogue::kScale) {
      finish_scaled(warp, sums, origin);
    } else if constexpr (kEpilogue == Epilogue::kResidual) {
      finish_residual(warp, sums, origin, next, tile < arguments.tiles);
    } else if constexpr (kEpilogue == Epilogue::kNorm) {
      finish_norm(warp, sums, rstd, origin, next, tile < arguments.tiles);
    } else if constexpr (kEpilogue == Epilogue::kNormGradient) {
      finish_norm_gradient(warp, sums, rstd, sums_of_out, origin, next, tile < arguments.tiles);
    } else if constexpr (kEpilogue == Epilogue::kHeadSums) {
      finish_head_sums(warp, sums, origin, next, tile < arguments.tiles);
    } else if constexpr (kEpilogue == Epilogue::kSoftmax) {
      finish_softmax(warp, sums, origin);
    } else if constexpr (kEpilogue == Epilogue::kGeluSlope) {
      finish_gelu_and_slope(warp, sums, origin);
    } else {
      finish_gelu(warp, sums, origin);
    }
  }
  if constexpr (kEpilogue == Epilogue::kNormGradient) write_sums_of_out(warp, sums_of_out, rank);
  if (lane == 0) tma_store_wait<0>();
}

template <class Shape, Epilogue kEpilogue, bool kTurnA, bool kTurnB, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matmul_hopper_kernel(const __grid_constant__ CUtensorMap a_map,
                         const __grid_constant__ CUtensorMap b_map,
                         const __grid_constant__ CUtensorMap out_map,
                         const __grid_constant__ CUtensorMap saved_map,
                         const __grid_constant__ MatmulArguments<T> arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kEpilogue == Epilogue::kSoftmax) {
    if (arguments.softmax.is_wanted != nullptr && *arguments.softmax.is_wanted == 0) return;
  }
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<MatmulShared<T, Shape>*>(shared_memory);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(a_map);
    prefetch_tensor_map(b_map);
    prefetch_tensor_map(out_map);
    prefetch_tensor_map(saved_map);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(Shape::kReaders);
    }
    for (int multiplier = 0; multiplier < Shape::kMultipliers; ++multiplier) {
      shared.turn[multiplier].init(1);
      for (auto& of_warp : shared.saved[multiplier]) {
        for (Barrier& saved : of_warp) saved.init(1);
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
  launch_dependent_grids();  // a column sum, if any: its CTAs come as these go, and wait for all of
                             // them

  const int rank = blockIdx.x % Shape::kCluster;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    warpgroup_reg_dealloc<Shape::kCopierRegisters>();
    if (threadIdx.x == 0) {
      copy_operands<Shape, kTurnA, kTurnB>(shared, arguments, a_map, b_map, rank);
    }
    __syncwarp();
  } else {
    warpgroup_reg_alloc<Shape::kMultiplierRegisters>();
    multiply_tiles<Shape, kEpilogue, kTurnA, kTurnB>(shared, arguments, out_map, saved_map, rank,
                                                     warp / 4 - 1);
  }
  // Nobody leaves while another block of the cluster may still write to its shared memory.
  if constexpr (Shape::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
#endif
}

// How many clusters of a kernel run at once; cudaErrorNotSupported if it does not run.
template <class Shape, Epilogue kEpilogue, bool kTurnA, bool kTurnB, typename T>
cudaError_t find_clusters(int* clusters) {
  const auto kernel = matmul_hopper_kernel<Shape, kEpilogue, kTurnA, kTurnB, T>;
  constexpr int kBytes = sizeof(MatmulShared<T, Shape>);
  static_assert(kBytes <= 232448);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  // Not every multiprocessor has a neighbour to form a cluster with.
  JAXLLM_RETURN_IF_ERROR(
      find_resident_clusters(kernel, Shape::kCluster, Shape::kThreads, kBytes, clusters));
  return *clusters > 0 ? cudaSuccess : cudaErrorNotSupported;
}

// A block a multiprocessor, which takes tiles until there are none.
template <class Shape, Epilogue kEpilogue, bool kTurnA, bool kTurnB, typename T>
cudaError_t launch_matmul(cudaStream_t stream, const HopperMatmul<T>& call,
                          int row_tiles_at_a_time) {
  const auto kernel = matmul_hopper_kernel<Shape, kEpilogue, kTurnA, kTurnB, T>;
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int found = 0;
  JAXLLM_RETURN_IF_ERROR((find_clusters<Shape, kEpilogue, kTurnA, kTurnB, T>(&found)));

  const int64_t rows = call.rows, columns = call.columns, depth = call.depth;
  CUtensorMap a_map, b_map, out_map, saved_map;
  const Matrix a = kTurnA ? Matrix{call.a, depth, rows} : Matrix{call.a, rows, depth};
  const Matrix b = kTurnB ? Matrix{call.b, depth, columns} : Matrix{call.b, columns, depth};
  JAXLLM_RETURN_IF_ERROR(
      encode_matrix_map(a, kType, (kTurnA ? 64 : Shape::kRows) / Shape::kClusterColumns, &a_map));
  JAXLLM_RETURN_IF_ERROR(
      encode_matrix_map(b, kType, (kTurnB ? 64 : Shape::kColumns) / Shape::kClusterRows, &b_map));
  // What an epilogue has no use for: any map does.
  out_map = saved_map = a_map;
  if (kEpilogue != Epilogue::kWide) {
    JAXLLM_RETURN_IF_ERROR(
        encode_matrix_map({call.out, rows, columns}, kType, kBandRows, &out_map));
  }
  if (kEpilogue == Epilogue::kGelu || kFirstSaved<kEpilogue> > 0) {
    JAXLLM_RETURN_IF_ERROR(
        encode_matrix_map({call.saved, rows, columns}, kType, kBandRows, &saved_map));
  }

  const int64_t row_tiles = divide_up(rows, Shape::kRows * Shape::kClusterRows);
  const int64_t column_tiles = divide_up(columns, Shape::kColumns * Shape::kClusterColumns);
  const int64_t tiles = row_tiles * column_tiles;
  if (tiles >= int64_t{1} << 30) return cudaErrorNotSupported;
  const MatmulArguments<T> arguments{static_cast<int>(rows),
                                     static_cast<int>(columns),
                                     static_cast<int>(divide_up(depth, Shape::kDepth)),
                                     static_cast<int>(row_tiles),
                                     static_cast<int>(tiles),
                                     row_tiles_at_a_time,
                                     call.bias,
                                     call.partial,
                                     call.wide_out,
                                     call.slopes,
                                     static_cast<int>(column_tiles) * Shape::kClusterColumns,
                                     call.head_sums,
                                     static_cast<int>(call.tokens),
                                     call.softmax,
                                     call.norm};
  int64_t clusters = std::min<int64_t>(found, call.most_clusters);
  if (kSumsRows<kEpilogue>) {
    // All tiles of a row run at once; and a block's tiles have the same columns.
    if (column_tiles > clusters) return cudaErrorNotSupported;
    clusters -= clusters % column_tiles;
  }
  clusters = std::min(tiles, clusters);
  if (call.clusters != nullptr) *call.clusters = static_cast<int>(clusters);
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(clusters) * Shape::kCluster);
  launch.block = dim3(Shape::kThreads);
  launch.shared = sizeof(MatmulShared<T, Shape>);
  launch.cluster = Shape::kCluster;
  // Beside another kernel of a shared GPU some of the blocks might find no room, and those that
  // have some would wait for them.
  launch.cooperative = kSumsRows<kEpilogue>;
  return launch_kernel(stream, kernel, launch, a_map, b_map, out_map, saved_map, arguments);
}

}  // namespace
}  // namespace jaxllm
