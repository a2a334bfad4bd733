#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "optimizer/global_norm.h"
#include "optimizer/leaves.cuh"

namespace jaxllm {
namespace {

constexpr int kNormThreads = 256;
constexpr int kFinalThreads = 1024;

// This thread's part of the sum of squares from `first` to `end`.
template <typename T>
__device__ __forceinline__ float sum_of_squares(const T* x, int64_t first, int64_t end) {
  constexpr int kVector = kPackSize<T>;
  constexpr int kStep = kNormThreads * kVector;
  float sums[4] = {};
  int64_t i = first;
  if (reinterpret_cast<std::uintptr_t>(x) % 16 == 0) {
    const auto add = [&](const Pack<T>& pack, float& sum) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum += pack[k] * pack[k];
    };
    for (; i + 4 * kStep <= end; i += 4 * kStep) {
      Pack<T> packs[4];  // loads in flight
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        packs[p] = load_streaming<kVector>(x + i + p * kStep + threadIdx.x * kVector);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) add(packs[p], sums[p]);
    }
    for (; i + kStep <= end; i += kStep) {
      add(load_streaming<kVector>(x + i + threadIdx.x * kVector), sums[0]);
    }
  }
  for (i += threadIdx.x; i < end; i += kNormThreads) sums[0] += to_float(x[i]) * to_float(x[i]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// CTA x of group y stores the sum of squares of one chunk of one leaf.
__global__ void __launch_bounds__(kNormThreads)
    global_norm_kernel(const __grid_constant__ LeafTable<NormLeaf> table, float* partial,
                       int64_t partials, int64_t chunk) {
  __shared__ float scratch[32];
  const int index = table.find(blockIdx.x);
  const NormLeaf& leaf = table.leaves[index];
  const int64_t first = (blockIdx.x - table.first_ctas[index]) * chunk;
  const int64_t end = min(first + chunk, leaf.size), offset = blockIdx.y * leaf.size;
  float sum[1];
  if (leaf.type == LeafType::kFloat) {
    sum[0] = sum_of_squares(static_cast<const float*>(leaf.x) + offset, first, end);
  } else if (leaf.type == LeafType::kBFloat16) {
    sum[0] = sum_of_squares(static_cast<const __nv_bfloat16*>(leaf.x) + offset, first, end);
  } else {
    sum[0] = sum_of_squares(static_cast<const __half*>(leaf.x) + offset, first, end);
  }
  sum_over_cta(sum, scratch);
  if (threadIdx.x == 0) partial[blockIdx.y * partials + blockIdx.x] = sum[0];
}

// CTA x adds the partial sums of group x.
__global__ void __launch_bounds__(kFinalThreads)
    global_norm_final_kernel(const float* partial, float* norm, int64_t partials) {
  __shared__ float scratch[32];
  float sum[1] = {0.0f};
#pragma unroll 8  // several loads in flight
  for (int64_t i = threadIdx.x; i < partials; i += kFinalThreads) {
    sum[0] += partial[blockIdx.x * partials + i];
  }
  sum_over_cta(sum, scratch);
  if (threadIdx.x == 0) norm[blockIdx.x] = sqrtf(sum[0]);
}

}  // namespace

cudaError_t global_norm(cudaStream_t stream, const std::vector<NormLeaf>& leaves, float* norm,
                        float* partial, int64_t partials, int64_t chunk, int64_t groups) {
  if (groups == 0) return cudaSuccess;
  float* next = partial;
  JAXLLM_RETURN_IF_ERROR(
      launch_tables(leaves, chunk, [&](const LeafTable<NormLeaf>& table, int64_t ctas) {
        float* const mine = next;
        next += ctas;
        return launch_kernel(stream, global_norm_kernel, {dim3(ctas, groups), kNormThreads}, table,
                             mine, partials, chunk);
      }));
  return launch_kernel(stream, global_norm_final_kernel, {groups, kFinalThreads}, partial, norm,
                       partials);
}

int64_t global_norm_partials(const std::vector<NormLeaf>& leaves, int64_t chunk) {
  int64_t partials = 0;
  for (const NormLeaf& leaf : leaves) partials += divide_up(leaf.size, chunk);
  return partials;
}

}  // namespace jaxllm
