// The launchers of the forward on Hopper: the workspace, the shape that suits a call, and the maps.
#include <algorithm>

#include "attention/flash_forward_hopper.cuh"
#include "common/zero_counter.cuh"

namespace jaxllm {
namespace {

using namespace hopper;

// The parts of the workspace.
struct ForwardWorkspace {
  int64_t tiles;  // with segments

  static constexpr int64_t counter_at() { return 0; }
  static constexpr int64_t keys_seen_at() { return 4; }
  int64_t size() const { return keys_seen_at() + tiles * int64_t{sizeof(TileRange) / sizeof(int)}; }
};

template <typename Shape>
ForwardWorkspace workspace_of(const HopperAttention& a) {
  const int64_t tiles = a.batch * divide_up(a.queries, int64_t{Shape::kQueries});
  return ForwardWorkspace{a.query_segments == nullptr ? int64_t{0} : tiles};
}

// A block a multiprocessor, which takes tiles until there are none.
template <typename T, typename Shape, bool kSegments>
cudaError_t launch(cudaStream_t stream, const HopperAttention& attention, HeadRows<const T> q,
                   HeadRows<const T> k, HeadRows<const T> v, HeadRows<T> out, float* lse,
                   int* workspace) {
  const auto kernel = flash_attention_forward_hopper_kernel<T, Shape, kSegments>;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));

  CUtensorMap q_map, k_map, v_map, out_map;
  JAXLLM_RETURN_IF_ERROR(map_queries(attention, q, 64, &q_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(attention, k, Shape::kKeys, &k_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(attention, v, Shape::kKeys, &v_map));
  JAXLLM_RETURN_IF_ERROR(map_queries(attention, out, 64, &out_map));

  const int64_t query_tiles = divide_up(attention.queries, Shape::kQueries);
  const int64_t tiles = query_tiles * attention.batch * attention.heads;
  if (tiles > kMaxTiles) return cudaErrorNotSupported;
  // As many as have their keys and values in the L2 cache together.
  const int64_t group = attention.heads / attention.kv_heads;
  const int64_t groups_at_a_time = std::clamp<int64_t>(
      kCachedBytes / std::max<int64_t>(2 * attention.keys * Shape::kWidth * sizeof(T), 1), 1,
      attention.batch * attention.kv_heads);
  const Band band = to_band(attention);
  const ForwardWorkspace parts = workspace_of<Shape>(attention);
  int* const counter = workspace + parts.counter_at();
  auto* const keys_seen = reinterpret_cast<TileRange*>(workspace + parts.keys_seen_at());
  if constexpr (kSegments) {
    JAXLLM_RETURN_IF_ERROR((find_tile_ranges<Shape::kQueries, Shape::kKeys>(
        stream, attention, band, keys_seen, /*of_keys=*/nullptr)));
  }
  const ForwardArguments arguments{band,
                                   static_cast<int>(attention.batch),
                                   static_cast<int>(attention.heads),
                                   static_cast<int>(attention.kv_heads),
                                   static_cast<int>(query_tiles),
                                   static_cast<int>(tiles),
                                   static_cast<int>(groups_at_a_time * group),
                                   attention.scale,
                                   lse,
                                   counter,
                                   {attention.query_segments, attention.key_segments,
                                    attention.segment_ranges, keys_seen, nullptr}};
  JAXLLM_RETURN_IF_ERROR(zero_counter(stream, counter));
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(std::min<int64_t>(tiles, limits.multiprocessors)));
  launch.block = dim3(Shape::kThreads);
  launch.shared = sizeof(ForwardShared<T, Shape>);
  launch.overlap = true;
  return launch_kernel(stream, kernel, launch, q_map, k_map, v_map, out_map, arguments);
}

// Keys that the last of the queries sees: where they are few, or of documents, which are shorter
// than their sequence, NarrowShort is faster.
bool has_few_keys(const HopperAttention& a) {
  constexpr int64_t kFew = 1536;
  return a.query_segments != nullptr || std::min(a.keys, a.left + a.right + 1) < kFew;
}

template <typename T>
auto launcher_of(const HopperAttention& attention) {
  const bool segments = attention.query_segments != nullptr;
  if (attention.width == 128) return segments ? launch<T, Wide, true> : launch<T, Wide, false>;
  if (segments) return launch<T, NarrowShort, true>;
  return has_few_keys(attention) ? launch<T, NarrowShort, false> : launch<T, NarrowLong, false>;
}

}  // namespace

template <typename T>
bool FlashAttentionHopper<T>::serves(const HopperAttention& attention,
                                     std::initializer_list<HeadRows<const T>> arrays) {
  constexpr int64_t kMaxGridSide = 65535;  // of the backward
  if (!is_served(attention) || attention.batch > kMaxGridSide || attention.heads > kMaxGridSide) {
    return false;
  }
  for (const HeadRows<const T>& array : arrays) {
    const int64_t length = std::max(attention.queries, attention.keys);
    if (!has_tensor_map({array.data, attention.batch, length, attention.heads, attention.width,
                         array.row_stride})) {
      return false;
    }
  }
  DeviceLimits limits;
  const auto kernel = flash_attention_forward_hopper_kernel<T, Wide, false>;
  return find_hopper_kernel(kernel, &limits) == cudaSuccess;
}

template <typename T>
int64_t FlashAttentionHopper<T>::forward_workspace(const HopperAttention& attention) {
  return attention.width == 64 ? workspace_of<NarrowShort>(attention).size()
                               : workspace_of<Wide>(attention).size();
}

template <typename T>
cudaError_t FlashAttentionHopper<T>::forward(cudaStream_t stream, const HopperAttention& attention,
                                             HeadRows<const T> q, HeadRows<const T> k,
                                             HeadRows<const T> v, HeadRows<T> out, float* lse,
                                             int* workspace) {
  if (!is_served(attention)) return cudaErrorNotSupported;
  if (attention.batch == 0 || attention.queries == 0 || attention.heads == 0) return cudaSuccess;
  return launcher_of<T>(attention)(stream, attention, q, k, v, out, lse, workspace);
}

#define JAXLLM_INSTANTIATE(T)                                                              \
  template bool FlashAttentionHopper<T>::serves(const HopperAttention&,                    \
                                                std::initializer_list<HeadRows<const T>>); \
  template int64_t FlashAttentionHopper<T>::forward_workspace(const HopperAttention&);     \
  template cudaError_t FlashAttentionHopper<T>::forward(                                   \
      cudaStream_t, const HopperAttention&, HeadRows<const T>, HeadRows<const T>,          \
      HeadRows<const T>, HeadRows<T>, float*, int*)
JAXLLM_INSTANTIATE(__nv_bfloat16);
JAXLLM_INSTANTIATE(__half);
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
