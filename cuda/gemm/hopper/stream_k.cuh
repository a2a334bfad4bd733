// GEMMs whose K-blocks are split by StreamKScheduler: the launch of the GEMM, and the sum of its
// parts, which a second kernel computes.
//
//   GEMM kernel   accumulators of a part -> workspace                (EpiloguePartial)
//   sum kernel    workspace -> sums of all parts of a tile -> result  (sum_parts)
#pragma once

#include "gemm/hopper/epilogue_partial.cuh"
#include "gemm/hopper/kernel.cuh"

namespace jaxllm::hopper {

constexpr int kSumThreads = 256;

// Adds the parts of all tiles, in a fixed order: a thread those of eight neighbours in a row. The
// results have the sizes rows(problem) and columns(problem), the latter multiples of eight. They
// get the sums, and where these lie, by store(problem, row, column, index, sums).
template <class Tile, class Results>
__device__ __forceinline__ void sum_parts(const float* partial,
                                          const typename StreamKScheduler<Tile>::Params& plan,
                                          const Results& results) {
  using Parts = EpiloguePartial<Tile, float>;
  constexpr int kEights = Tile::kBlockN / 8;
  constexpr int kCtas = Tile::kBlockM * kEights / kSumThreads;  // of a tile
  const int tile = blockIdx.x / kCtas / Tile::kCluster;
  const int rank = blockIdx.x / kCtas % Tile::kCluster;
  const int index = blockIdx.x % kCtas * kSumThreads + threadIdx.x;
  // The lanes of a warp have four groups of columns of eight rows.
  const int j = index / 32 % (kEights / 4) * 4 + index % 4;
  const int row_in_eight = index / 4 % 8, eight_rows = index / 32 / (kEights / 4);
  const int consumer = eight_rows / (8 * Tile::kRowBlocks);
  const int row_block = eight_rows / 8 % Tile::kRowBlocks;
  const int warp = eight_rows / 2 % 4, half = eight_rows % 2;
  const WorkTile origin = plan.origin(tile, rank);
  const int row = origin.row + eight_rows * 8 + row_in_eight, column = origin.column + 8 * j;
  const auto remainders = plan.remainder_parts(tile);
  const int parts = plan.units + remainders.count;
  const int rows = results.rows(origin.problem), columns = results.columns(origin.problem);
  wait_on_dependent_grids();
  if (row >= rows || column >= columns) return;

  partial += Parts::offset(consumer, warp, row_block, half, j) + 8 * row_in_eight;
  float sums[8] = {};
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const int number =
        part < plan.units ? plan.unit_part(tile, part) : remainders.first + part - plan.units;
    const float* const from =
        partial + (int64_t{number} * Tile::kCluster + rank) * Parts::kPartSize;
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += values[i];
  }
  results.store(origin.problem, row, column, int64_t{row} * columns + column, sums);
}

// The parts of one tile of a cluster, in floats.
template <class Gemm>
constexpr int64_t kClusterPartSize = int64_t{Gemm::Tile::kCluster} * Gemm::Epilogue::kPartSize;

// Plans a GEMM or two for at most `clusters` clusters, and fewer where the workspace `partial`
// cannot hold the parts of so many.
template <class Gemm, int kCount>
cudaError_t plan_stream_k(const GemmShape (&shapes)[kCount], int64_t clusters, float* partial,
                          int64_t partial_floats, typename Gemm::Params* params) {
  constexpr int64_t kPart = kClusterPartSize<Gemm>;
  int64_t tiles = 0;
  for (const GemmShape& shape : shapes) tiles += Gemm::Scheduler::tiles_of(shape);
  const int64_t count = std::min(clusters, partial_floats / kPart - tiles);
  JAXLLM_RETURN_IF_ERROR(Gemm::Scheduler::plan(shapes, count, &params->scheduler));
  params->epilogue.partial = partial;
  return partial_floats < params->scheduler.parts() * kPart ? cudaErrorInvalidValue : cudaSuccess;
}

// Launches a planned GEMM, and the kernel that calls sum_parts.
template <class Gemm, class Results>
cudaError_t launch_stream_k(cudaStream_t stream, const typename Gemm::Params& params,
                            void (*sum_kernel)(const float*, typename Gemm::Scheduler::Params,
                                               Results),
                            const Results& results) {
  const auto& plan = params.scheduler;
  JAXLLM_RETURN_IF_ERROR(launch_clusters<Gemm>(stream, plan.ctas(), params));
  // A thread for eight elements of the tiles.
  Launch sums;
  sums.grid = dim3(static_cast<unsigned>(plan.tiles * kClusterPartSize<Gemm> / 8 / kSumThreads));
  sums.block = dim3(kSumThreads);
  sums.pdl = true;
  return launch_kernel(stream, sum_kernel, sums, static_cast<const float*>(params.epilogue.partial),
                       plan, results);
}

}  // namespace jaxllm::hopper
