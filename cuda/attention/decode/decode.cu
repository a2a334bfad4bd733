// The launcher of decode_attention: chooses a kernel, the shape of its CTAs and clusters.
#include <algorithm>
#include <type_traits>

#include "attention/decode.h"
#include "attention/decode/fallback.cuh"
#include "attention/decode/kv_pipeline.cuh"
#include "attention/decode/mainloop.cuh"
#include "attention/decode/mainloop_long.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/scheduler.cuh"
#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/shared_needs.h"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

using namespace decode;

constexpr int64_t kLongSplit = 1024;  // tokens of a CTA
constexpr int kMaxHeadDim = 256;

// The shared memory of a CTA with tensor cores.
template <int kWarps, int kStages, typename C, int kHeadDim>
constexpr size_t tensor_core_bytes(int heads, int cluster) {
  return kWarps * ring_bytes<C>(kHeadDim, kStages) +
         SplitKvMerge<kWarps, kHeadDim>::bytes(cluster, heads, kHeadDim);
}

// The same of the fallback.
constexpr size_t any_width_bytes(int heads, int cluster, int64_t width) {
  return sizeof(float) * kMinWarps * heads * width +
         SplitKvMerge<kMinWarps, 0>::bytes(cluster, heads, width);
}

// The least that a GPU must have: the shared memory of the smallest CTAs with kMaxHeads heads, and
// without clusters, among which the columns to merge would be divided.
const SharedNeed kNeedOfTensorCores(
    "decode_attention",
    std::max(tensor_core_bytes<kMinWarps, kMinStages, __nv_bfloat16, 128>(kMaxHeads, 1),
             tensor_core_bytes<kMinWarps, kMinStages, int8_t, 128>(kMaxHeads, 1)));
const SharedNeed kNeedOfAnyWidth("decode_attention_any_width",
                                 any_width_bytes(kMaxHeads, 1, kMaxHeadDim));

// The size of the clusters of a kernel's splits: the largest power of two that divides the splits
// and fits the GPU. `bytes(size)` is the shared memory of a CTA.
template <class Kernel, class Bytes>
cudaError_t choose_cluster(Kernel* kernel, int threads, int64_t splits, Bytes bytes, int* size) {
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  *size = 1;
  if (!image.has_clusters()) return cudaSuccess;
  while (*size < kMaxCluster && splits % (2 * *size) == 0) *size *= 2;
  // A part of a GPU may have fewer SMs together than a cluster wants.
  for (; *size > 1; *size /= 2) {
    int clusters = 0;
    JAXLLM_RETURN_IF_ERROR(find_resident_clusters(kernel, *size, threads, bytes(*size), &clusters));
    if (clusters > 0) break;
  }
  return cudaSuccess;
}

}  // namespace

template <typename T, typename C>
cudaError_t CachedAttention<T, C>::run(cudaStream_t stream, DecodeArrays<T, C> arrays, float scale,
                                       DecodeSizes sizes, int64_t splits) {
  const int64_t batch = sizes.batch, width = sizes.width;
  if (batch * sizes.heads * width == 0) return cudaSuccess;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());

  Params<T, C> params{arrays.q,       arrays.k, arrays.v,   arrays.k_scales, arrays.v_scales,
                      arrays.lengths, scale,    arrays.out, arrays.partial};
  params.heads = sizes.heads, params.kv_heads = sizes.kv_heads;
  params.length = sizes.length, params.width = width;
  params.group = sizes.heads / sizes.kv_heads;
  params.head_tiles = divide_up(params.group, kMaxHeads);
  params.max_heads = std::min(params.group, kMaxHeads);
  params.splits = splits, params.added = sizes.added;
  params.window = sizes.window, params.overlap = sizes.overlap;
  const int64_t group = batch / sizes.groups;
  params.sinks = Sinks::of_groups(arrays.sinks, sizes.groups, batch, sizes.heads);
  if (arrays.block_table != nullptr) {
    params.pages = {arrays.block_table, static_cast<int>(sizes.length / sizes.page),
                    static_cast<int>(sizes.pages), Divisor(sizes.page), static_cast<int>(group)};
  }

  // The most tokens that a query sees.
  const int64_t seen = sizes.window == 0 ? sizes.length : std::min(sizes.length, sizes.window);
  const auto with_cluster = [&](auto kernel, int warps, int cluster, size_t bytes) {
    params.cluster = cluster;
    params.clusters = splits / cluster;
    params.cta_columns = columns_of_cta(width, cluster);
    const dim3 grid(splits, sizes.kv_heads * params.head_tiles, batch);
    return launch_kernel(stream, kernel, {grid, dim3(32 * warps), bytes, cluster, sizes.overlap},
                         params);
  };
  const auto with = [&](auto kernel, int warps, auto bytes) {
    int cluster = 1;
    JAXLLM_RETURN_IF_ERROR(choose_cluster(kernel, 32 * warps, splits, bytes, &cluster));
    return with_cluster(kernel, warps, cluster, bytes(cluster));
  };
  const auto with_shape = [&](auto paged, auto kernel_stages, auto kernel_warps, auto head_dim) {
    constexpr bool kPaged = paged;
    constexpr int kStages = kernel_stages, kWarps = kernel_warps, kHeadDim = head_dim;
    static_assert(kStages < kMaxStages || tensor_core_bytes<kWarps, kStages, C, kHeadDim>(
                                              kMaxHeads, 1) <= kSmemForMaxStages);
    const auto bytes = [&](int cluster) {
      return tensor_core_bytes<kWarps, kStages, C, kHeadDim>(params.max_heads, cluster);
    };
    return with(decode_attention_kernel<kWarps, kStages, kPaged, T, C, kHeadDim>, kWarps, bytes);
  };
  const auto with_width = [&](auto paged, auto head_dim) {
    constexpr int kHeadDim = head_dim;
    constexpr bool kPaged = paged;
    constexpr std::integral_constant<int, kMaxWarps> max_warps;
    constexpr std::integral_constant<int, kMinWarps> min_warps;
    constexpr std::integral_constant<int, kMaxStages> max_stages;
    constexpr std::integral_constant<int, kMinStages> min_stages;
    const bool has_max_stages = limits.shared_bytes >= kSmemForMaxStages;
    // Short splits, or CTAs that do not have an SM each. Clusters do not fit on every last SM.
    const int64_t ctas = batch * sizes.kv_heads * params.head_tiles * splits;
    if (4 * ctas > 3 * limits.sms || seen < splits * kLongSplit) {
      return has_max_stages ? with_shape(paged, max_stages, min_warps, head_dim)
                            : with_shape(paged, min_stages, min_warps, head_dim);
    }
    if constexpr (kHeadDim * sizeof(C) >= 128) {
      using Traits = LongTraits<C, kHeadDim>;
      constexpr auto kernel = decode_attention_long_kernel<kPaged, T, C, kHeadDim>;
      constexpr size_t kBytes = sizeof(LongSmem<Traits>);
      static_assert(kBytes <= kSmemForMaxStages);
      if (has_max_stages && params.group <= Traits::kHeads) {
        int cluster = 1;
        JAXLLM_RETURN_IF_ERROR(
            choose_cluster(kernel, Traits::kThreads, splits, [](int) { return kBytes; }, &cluster));
        if (cluster == Traits::kCtas) return with_cluster(kernel, Traits::kWarps, cluster, kBytes);
      }
    }
    if (has_max_stages) return with_shape(paged, max_stages, max_warps, head_dim);
    constexpr int64_t kBytes = tensor_core_bytes<kMaxWarps, kMinStages, C, kHeadDim>(kMaxHeads, 1);
    return kBytes <= limits.shared_bytes ? with_shape(paged, min_stages, max_warps, head_dim)
                                         : with_shape(paged, min_stages, min_warps, head_dim);
  };
  const auto choose_kernel = [&](auto paged) {
    if constexpr (sizeof(T) == 2) {
      if (aligned_16(arrays.q, arrays.k, arrays.v)) {
        if (width == 64) return with_width(paged, std::integral_constant<int, 64>{});
        if (width == 128) return with_width(paged, std::integral_constant<int, 128>{});
      }
    }
    const auto with_columns = [&](auto columns) {  // of a lane
      const auto bytes = [&](int cluster) {
        return any_width_bytes(params.max_heads, cluster, width);
      };
      return with(decode_attention_any_width_kernel<T, C, columns>, kMinWarps, bytes);
    };
    if (width <= 64) return with_columns(std::integral_constant<int, 2>{});
    if (width <= 128) return with_columns(std::integral_constant<int, 4>{});
    return with_columns(std::integral_constant<int, 8>{});
  };
  JAXLLM_RETURN_IF_ERROR(arrays.block_table == nullptr ? choose_kernel(std::false_type{})
                                                       : choose_kernel(std::true_type{}));
  if (params.clusters == 1) return cudaSuccess;
  const dim3 grid(batch * sizes.heads);
  return launch_kernel(stream, decode_attention_merge_kernel<T>,
                       {grid, dim3(128), /*shared=*/0, /*cluster=*/1, /*pdl=*/true}, arrays.partial,
                       arrays.out, params.clusters, static_cast<int>(width), params.sinks);
}

template struct CachedAttention<float, float>;
template struct CachedAttention<float, int8_t>;
template struct CachedAttention<__nv_bfloat16, __nv_bfloat16>;
template struct CachedAttention<__nv_bfloat16, int8_t>;
template struct CachedAttention<__half, __half>;
template struct CachedAttention<__half, int8_t>;

}  // namespace jaxllm
