#include "gemm/hopper/epilogue_partial.cuh"
#include "gemm/hopper/kernel.cuh"
#include "gemm/hopper/wgrad.h"

namespace jaxllm {
namespace {

using namespace hopper;

using WgradTile = GemmTile<192, 4, 1, 1, /*kCooperative=*/true>;
using Scheduler = StreamKScheduler<WgradTile>;
// x and dout have a token in each row: both are MN-major.
template <typename T>
using WgradGemm = Gemm<Mainloop<WgradTile, T, Major::kMN, Major::kMN, Scheduler::kProblems>,
                       StreamKScheduler, EpiloguePartial>;

template <typename T>
struct WgradOutputs {
  T* dweight[2];
  int rows[2], columns[2];
};

constexpr int kSumThreads = 256;

// Adds the parts of all tiles: a thread those of eight neighbours in a row.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    wgrad_sum_parts_kernel(const float* partial, const __grid_constant__ Scheduler::Params plan,
                           const __grid_constant__ WgradOutputs<T> outputs) {
  using Tile = WgradTile;
  using Parts = EpiloguePartial<Tile, T>;
  constexpr int kEights = Tile::kBlockN / 8;
  constexpr int kCtas = Tile::kBlockM * kEights / kSumThreads;  // of a tile
  const int tile = blockIdx.x / kCtas;
  const int index = blockIdx.x % kCtas * kSumThreads + threadIdx.x;
  // The lanes of a warp have four groups of columns of eight rows.
  const int j = index / 32 % (kEights / 4) * 4 + index % 4;
  const int row_in_eight = index / 4 % 8, eight_rows = index / 32 / (kEights / 4);
  const int consumer = eight_rows / 16, row_block = eight_rows / 8 % 2;
  const int warp = eight_rows / 2 % 4, half = eight_rows % 2;
  const WorkTile origin = plan.origin(tile);
  const int row = origin.row + eight_rows * 8 + row_in_eight, column = origin.column + 8 * j;
  const Scheduler::PartRange remainders = plan.remainder_parts(tile);
  const int parts = plan.units + remainders.count;
  const int rows = outputs.rows[origin.problem], columns = outputs.columns[origin.problem];
  wait_on_dependent_grids();
  if (row >= rows || column >= columns) return;

  partial += Parts::offset(consumer, warp, row_block, half, j) + 8 * row_in_eight;
  float sums[8] = {};
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const int number =
        part < plan.units ? plan.unit_part(tile, part) : remainders.first + part - plan.units;
    const float* const from = partial + int64_t{number} * Parts::kPartSize;
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += values[i];
  }
  *reinterpret_cast<uint4*>(outputs.dweight[origin.problem] + int64_t{row} * columns + column) =
      make_uint4(pack_pair<T>(sums[0], sums[1]), pack_pair<T>(sums[2], sums[3]),
                 pack_pair<T>(sums[4], sums[5]), pack_pair<T>(sums[6], sums[7]));
}

}  // namespace

template <typename T>
cudaError_t wgrad_pair(cudaStream_t stream, const Wgrad<T> (&gradients)[2], int64_t tokens,
                       float* partial, int64_t partial_floats) {
  using Tile = WgradTile;
  constexpr int kPartSize = EpiloguePartial<Tile, T>::kPartSize;
  static_assert(kWgradTileRows == Tile::kBlockM && kWgradTileColumns == Tile::kBlockN);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(matmul_hopper_kernel<WgradGemm<T>>, &limits));
  if (tokens <= 0) return cudaErrorNotSupported;

  typename WgradGemm<T>::Params params;
  params.epilogue.partial = partial;
  GemmShape shapes[2];
  WgradOutputs<T> outputs;
  int64_t tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const auto [x, dout, dweight, rows, columns] = gradients[i];
    JAXLLM_RETURN_IF_ERROR(
        WgradGemm<T>::Mainloop::encode(x, dout, rows, columns, tokens, i, &params.mainloop));
    shapes[i] = {rows, columns, tokens};
    outputs.dweight[i] = dweight;
    outputs.rows[i] = static_cast<int>(rows);
    outputs.columns[i] = static_cast<int>(columns);
    tiles += divide_up(rows, Tile::kBlockM) * divide_up(columns, Tile::kBlockN);
  }
  // A CTA for each SM, or fewer where `partial` cannot hold the parts of so many.
  const int64_t ctas = std::min<int64_t>(limits.sms, partial_floats / kPartSize - tiles);
  const Scheduler::Params& plan = params.scheduler;
  JAXLLM_RETURN_IF_ERROR(Scheduler::plan(shapes, ctas, &params.scheduler));
  if (partial_floats < int64_t{plan.parts()} * kPartSize) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(launch_clusters<WgradGemm<T>>(stream, plan.ctas(), params));
  Launch sums;
  sums.grid = dim3(plan.tiles * (kPartSize / 8 / kSumThreads));
  sums.block = dim3(kSumThreads);
  sums.pdl = true;
  return launch_kernel(stream, wgrad_sum_parts_kernel<T>, sums, static_cast<const float*>(partial),
                       plan, outputs);
}

template cudaError_t wgrad_pair(cudaStream_t, const Wgrad<__nv_bfloat16> (&)[2], int64_t, float*,
                                int64_t);
template cudaError_t wgrad_pair(cudaStream_t, const Wgrad<__half> (&)[2], int64_t, float*, int64_t);

}  // namespace jaxllm
