#include "gemm/weight_gradients.cuh"

namespace jaxllm {

template <typename T>
cudaError_t weight_gradients(cudaStream_t stream, const WeightGradient<T> (&gradients)[2],
                             int64_t tokens, float* partial, int64_t partial_floats) {
  using Tile = GradientTile;
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto kernel = weight_gradients_kernel<T>;
  constexpr int kBytes = sizeof(GradientShared<T>);
  static_assert(kBytes <= 232448);
  static_assert(kGradientTileRows == Tile::kRows && kGradientTileColumns == Tile::kColumns);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  if (tokens <= 0) return cudaErrorNotSupported;

  GradientMaps maps;
  GradientPlan plan = {};
  GradientOutputs<T> outputs;
  for (int i = 0; i < 2; ++i) {
    const auto [x, dout, dweight, rows, columns] = gradients[i];
    JAXLLM_RETURN_IF_ERROR(encode_matrix_map({x, tokens, rows}, kType, Tile::kDepth, &maps.x[i]));
    JAXLLM_RETURN_IF_ERROR(
        encode_matrix_map({dout, tokens, columns}, kType, Tile::kDepth, &maps.dout[i]));
    outputs.dweight[i] = dweight;
    outputs.rows[i] = static_cast<int>(rows);
    outputs.columns[i] = static_cast<int>(columns);
    const int64_t row_tiles = divide_up(rows, Tile::kRows);
    const int64_t tiles = row_tiles * divide_up(columns, Tile::kColumns);
    if (tiles > limits.multiprocessors) return cudaErrorNotSupported;
    plan.row_tiles[i] = static_cast<int>(row_tiles);
    plan.second_tile = plan.tiles;
    plan.tiles += static_cast<int>(tiles);
  }
  // A block a multiprocessor, or fewer where `partial` has not room for the parts of so many.
  const int64_t room = partial_floats / Tile::kSize - plan.tiles;
  const int blocks = static_cast<int>(std::min<int64_t>(limits.multiprocessors, room));
  if (blocks < plan.tiles) return cudaErrorNotSupported;
  plan.steps = static_cast<int>(divide_up(tokens, Tile::kDepth));
  plan.lengths = blocks / plan.tiles;
  plan.length = static_cast<int>(divide_up(int64_t{plan.tiles} * plan.steps, blocks));
  // Of few steps a block may take more than an equal part.
  plan.lengths = std::min(plan.lengths, static_cast<int>(divide_up(plan.steps, plan.length)));
  plan.rest = std::max(0, plan.steps - plan.lengths * plan.length);
  if (plan.rest > 0) {
    plan.rest_blocks = blocks - plan.tiles * plan.lengths;
    plan.whole_rests = std::min(plan.length / plan.rest, plan.tiles / plan.rest_blocks);
    plan.share = static_cast<int>(
        divide_up(int64_t{plan.tiles - plan.first_cut()} * plan.rest, plan.rest_blocks));
  }
  if (partial_floats < int64_t{plan.parts()} * Tile::kSize) return cudaErrorInvalidValue;
  Launch products;
  products.grid = dim3(plan.blocks());
  products.block = dim3(Tile::kThreads);
  products.shared = kBytes;
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, kernel, products, maps, plan, partial));
  Launch sums;
  sums.grid = dim3(plan.tiles * (Tile::kSize / 8 / kSumThreads));
  sums.block = dim3(kSumThreads);
  sums.overlap = true;
  return launch_kernel(stream, sum_gradient_parts_kernel<T>, sums,
                       static_cast<const float*>(partial), plan, outputs);
}

template cudaError_t weight_gradients(cudaStream_t, const WeightGradient<__nv_bfloat16> (&)[2],
                                      int64_t, float*, int64_t);
template cudaError_t weight_gradients(cudaStream_t, const WeightGradient<__half> (&)[2], int64_t,
                                      float*, int64_t);

}  // namespace jaxllm
