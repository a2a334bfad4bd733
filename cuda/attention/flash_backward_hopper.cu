// The launchers of the gradient on Hopper: the workspace, and its kernels one after the other.
#include <algorithm>

#include "attention/flash_backward_hopper.cuh"
#include "attention/flash_backward_hopper_rows.cuh"

namespace jaxllm {
namespace {

using namespace hopper;

// Whether the tickets go through each head's order from its first step to its last: so a tile waits
// for those with earlier tickets only, and nothing can wait for ever.
constexpr bool is_in_order(int heads, int key_tiles, int split, int heads_at_a_time) {
  int steps[8] = {};  // of each head, so far
  for (int ticket = 0; ticket < heads * key_tiles; ++ticket) {
    const TilePlace place = place_in_halves(ticket, heads, key_tiles, split, heads_at_a_time);
    if (place.row < 0 || place.row >= heads || place.column != steps[place.row]) return false;
    ++steps[place.row];
  }
  for (int head = 0; head < heads; ++head) {
    if (steps[head] != key_tiles) return false;
  }
  return true;
}
static_assert(is_in_order(1, 256, 128, 1) && is_in_order(8, 32, 16, 8) && is_in_order(7, 9, 5, 3) &&
              is_in_order(5, 2, 1, 4) && is_in_order(3, 6, 3, 16) && is_in_order(4, 3, 2, 1));

// The parts of the workspace, in floats.
struct BackwardWorkspace {
  int64_t rows, dq_sums, ranks;
  int64_t query_tiles, key_tiles;  // with segments

  static constexpr int64_t kRange = sizeof(TileRange) / sizeof(float);
  int64_t lse_at() const { return 0; }
  int64_t delta_at() const { return rows; }
  int64_t dq_sums_at() const { return 2 * rows; }
  int64_t queries_seen_at() const { return dq_sums_at() + dq_sums; }
  int64_t keys_seen_at() const { return queries_seen_at() + key_tiles * kRange; }
  int64_t ranks_at() const { return keys_seen_at() + query_tiles * kRange; }
  int64_t tickets_at() const { return ranks_at() + ranks; }
  int64_t size() const { return tickets_at() + 1; }
};

template <int kWidth>
BackwardWorkspace workspace_of_width(const HopperAttention& a) {
  using Shape = BackwardShape<kWidth>;
  const int64_t query_tiles = a.batch * divide_up(a.queries, Shape::kQueries);
  const int64_t tiles = query_tiles * a.heads;
  const bool segments = a.query_segments != nullptr;
  return {tiles * Shape::kQueries, tiles * Shape::kQueries * kWidth, tiles,
          segments ? query_tiles : 0, segments ? a.batch * divide_up(a.keys, Shape::kKeys) : 0};
}

BackwardWorkspace workspace_of(const HopperAttention& a) {
  return a.width == 64 ? workspace_of_width<64>(a) : workspace_of_width<128>(a);
}

// The partial sums of a bias's gradient, in rows of one head.
template <int kWidth>
struct BiasPartial {
  using Shape = BackwardShape<kWidth>;
  int64_t query_tiles, heads, kv_heads;

  explicit BiasPartial(const HopperAttention& a)
      : query_tiles(a.batch * divide_up(a.queries, Shape::kQueries)),
        heads(a.heads),
        kv_heads(a.kv_heads) {}

  int64_t dq_rows() const { return query_tiles * Shape::kSumsOfDq; }
  int64_t dout_rows() const { return query_tiles * (heads / kv_heads); }
  int64_t dq_size() const { return dq_rows() * heads * kWidth; }
  int64_t size() const { return dq_size() + dout_rows() * kv_heads * kWidth; }

  // `of_dout` are the partial sums of dout.
  template <typename T>
  cudaError_t sum(cudaStream_t stream, const FlashBias& bias, const float* of_dout) const {
    const int64_t dq_columns = heads * kWidth, dout_columns = kv_heads * kWidth;
    const dim3 grid((dq_columns + 2 * dout_columns) / 32, bias.groups);
    return launch_kernel(stream, flash_attention_backward_bias_kernel<T>, {grid, kColumnSumThreads},
                         bias.partial, of_dout, static_cast<T*>(bias.gradient),
                         dq_rows() / bias.groups, dout_rows() / bias.groups, dq_columns,
                         dout_columns);
  }
};

template <typename T, int kWidth, bool kSegments>
cudaError_t launch(cudaStream_t stream, const HopperAttention& attention, HeadRows<const T> q,
                   HeadRows<const T> k, HeadRows<const T> v, HeadRows<const T> out,
                   const float* lse, HeadRows<const T> dout, HeadRows<T> dq, HeadRows<T> dk,
                   HeadRows<T> dv, float* workspace, const FlashBias& bias, const FlashSums& sums) {
  using Shape = BackwardShape<kWidth>;
  const auto kernel = flash_attention_backward_hopper_kernel<T, kWidth, kSegments>;
  constexpr int kBytes = sizeof(BackwardShared<T, kWidth>);
  static_assert(kBytes <= 227 << 10);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  const int multiprocessors = limits.multiprocessors;
  constexpr int64_t kMaxGridSide = 65535;
  const bool has_bias = bias.gradient != nullptr;
  if (!is_aligned(out) || !is_aligned(dq) || !aligned_16(bias.partial) ||
      reinterpret_cast<std::uintptr_t>(workspace) % kCacheLineBytes != 0 ||
      attention.heads > kMaxGridSide || attention.batch > kMaxGridSide) {
    return cudaErrorNotSupported;
  }

  CUtensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map, dq_map;
  JAXLLM_RETURN_IF_ERROR(map_queries(attention, q, Shape::kQueries, &q_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(attention, k, Shape::kKeys, &k_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(attention, v, Shape::kKeys, &v_map));
  JAXLLM_RETURN_IF_ERROR(map_queries(attention, dout, Shape::kQueries, &dout_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(attention, dk, 64, &dk_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(attention, dv, 64, &dv_map));
  JAXLLM_RETURN_IF_ERROR(map_queries(attention, dq, Shape::kQueries, &dq_map));

  const Band band = to_band(attention);
  const TiledBand<Shape::kQueries, Shape::kKeys> tiled(band);
  const int key_tiles = tiled.key_tiles(), query_tiles = tiled.query_tiles();
  const int padded_queries = query_tiles * Shape::kQueries;
  const BackwardWorkspace parts = workspace_of(attention);
  // In halves where the mask makes tiles of unequal length, where they are more than run at once
  // but so few that the end of the grid counts, and where the first half of a head runs at once:
  // see take_item. In a simulation of the additions' order on 132 multiprocessors, the share of the
  // time in which they work is 0.95 in halves and 0.87 without for 32 key heads of 32 tiles, each
  // of four heads; but 0.81 and 0.95 for 384 heads of 8 tiles.
  const bool is_triangle = !kSegments && attention.right < attention.keys &&
                           attention.left >= attention.queries + attention.keys;
  const int half = (key_tiles + 1) / 2;
  constexpr int64_t kFewTiles = 16;  // to a multiprocessor
  const int64_t items = attention.batch * attention.kv_heads * key_tiles;
  const bool halves = is_triangle && half <= multiprocessors && items > multiprocessors &&
                      items < kFewTiles * multiprocessors;
  const int split = halves ? half : key_tiles;
  if (items > kMaxTiles || parts.ranks > kMaxTiles) return cudaErrorNotSupported;
  // In halves as many as fill the grid with their first; else as many as fill it twice, but no more
  // than have what they read and add up in the L2 cache together. Of documents the tiles at work
  // have but a part of that.
  const int64_t bytes_of_head = kWidth * (attention.heads / attention.kv_heads * attention.queries *
                                              (2 * sizeof(T) + sizeof(float)) +
                                          attention.keys * 2 * sizeof(T));
  const int64_t filling = divide_up(2 * multiprocessors, key_tiles);
  const int64_t cached = kCachedBytes / bytes_of_head;
  const int64_t heads_at_a_time = halves      ? multiprocessors / half
                                  : kSegments ? filling
                                              : std::clamp<int64_t>(cached, 1, filling);

  auto* const queries_seen = reinterpret_cast<TileRange*>(workspace + parts.queries_seen_at());
  auto* const keys_seen = reinterpret_cast<TileRange*>(workspace + parts.keys_seen_at());
  if constexpr (kSegments) {
    JAXLLM_RETURN_IF_ERROR((find_tile_ranges<Shape::kQueries, Shape::kKeys>(
        stream, attention, band, /*of_queries=*/keys_seen, /*of_keys=*/queries_seen)));
  }
  const BiasPartial<kWidth> partial(attention);
  const bool has_sums = kWidth == 64 && sums.delta != nullptr && has_bias &&
                        attention.heads == attention.kv_heads &&
                        attention.queries % Shape::kQueries == 0;
  float* const of_dout = has_sums   ? const_cast<float*>(sums.dout)
                         : has_bias ? bias.partial + partial.dq_size()
                                    : nullptr;
  const BackwardArguments arguments{
      band,
      static_cast<int>(attention.heads),
      static_cast<int>(attention.kv_heads),
      attention.scale,
      split,
      workspace + parts.lse_at(),
      has_sums ? const_cast<float*>(sums.delta) : workspace + parts.delta_at(),
      workspace + parts.dq_sums_at(),
      reinterpret_cast<int*>(workspace + parts.ranks_at()),
      reinterpret_cast<int*>(workspace + parts.tickets_at()),
      static_cast<int>(items),
      // To begin with what was written or read last: by the product that makes the sums the last
      // sequences; the kernel over the rows ends with the first.
      /*from_last=*/has_sums,
      static_cast<int>(heads_at_a_time),
      {attention.query_segments, attention.key_segments, attention.segment_ranges, keys_seen,
       queries_seen},
      has_bias ? bias.partial : nullptr,
      of_dout};
  if (has_sums) {
    const dim3 grid(divide_up(padded_queries, kRowThreads), attention.heads, attention.batch);
    JAXLLM_RETURN_IF_ERROR(launch_kernel(stream,
                                         flash_attention_backward_lse_kernel<T, kWidth, kSegments>,
                                         {grid, kRowThreads}, arguments, lse, dq));
  } else {
    constexpr int kRowsAtOnce = kRowThreads / (kWidth / kPackSize<T>);
    const dim3 grid(padded_queries / (has_bias ? Shape::kQueries : kRowsAtOnce), attention.heads,
                    attention.batch);
    const auto row_kernel = has_bias
                                ? flash_attention_backward_rows_kernel<T, kWidth, kSegments, true>
                                : flash_attention_backward_rows_kernel<T, kWidth, kSegments, false>;
    JAXLLM_RETURN_IF_ERROR(
        launch_kernel(stream, row_kernel, {grid, kRowThreads}, arguments, out, dout, lse, dq));
  }
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, multiprocessors)));
  launch.block = dim3(Shape::kThreads);
  launch.shared = kBytes;
  launch.overlap = true;
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, kernel, launch, q_map, k_map, v_map, dout_map,
                                       dk_map, dv_map, dq_map, arguments));
  if constexpr (!Shape::kRoundsDq) {
    const dim3 dq_grid(query_tiles, attention.heads, attention.batch);
    const auto dq_kernel = has_bias
                               ? flash_attention_backward_dq_kernel<T, kWidth, kSegments, true>
                               : flash_attention_backward_dq_kernel<T, kWidth, kSegments, false>;
    JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, dq_kernel, {dq_grid, kRowThreads}, arguments, dq));
  }
  return has_bias ? partial.template sum<T>(stream, bias, of_dout) : cudaSuccess;
}

// Without queries keys and values have no gradient.
template <typename T>
cudaError_t zero_keys(cudaStream_t stream, const HopperAttention& a, HeadRows<T> gradient) {
  return cudaMemset2DAsync(gradient.data, gradient.row_stride * sizeof(T), 0,
                           a.kv_heads * a.width * sizeof(T), a.batch * a.keys, stream);
}

template <typename T>
auto launcher_of(const HopperAttention& attention) {
  if (attention.query_segments == nullptr) {
    return attention.width == 64 ? launch<T, 64, false> : launch<T, 128, false>;
  }
  return attention.width == 64 ? launch<T, 64, true> : launch<T, 128, true>;
}

}  // namespace

template <typename T>
int64_t FlashAttentionHopper<T>::backward_workspace(const HopperAttention& attention) {
  return workspace_of(attention).size();
}

template <typename T>
int64_t FlashAttentionHopper<T>::bias_partial(const HopperAttention& attention) {
  return attention.width == 64 ? BiasPartial<64>(attention).size()
                               : BiasPartial<128>(attention).size();
}

template <typename T>
cudaError_t FlashAttentionHopper<T>::backward(cudaStream_t stream, const HopperAttention& attention,
                                              HeadRows<const T> q, HeadRows<const T> k,
                                              HeadRows<const T> v, HeadRows<const T> out,
                                              const float* lse, HeadRows<const T> dout,
                                              HeadRows<T> dq, HeadRows<T> dk, HeadRows<T> dv,
                                              float* workspace, const FlashBias& bias,
                                              const FlashSums& sums) {
  if (!is_served(attention)) return cudaErrorNotSupported;
  if (attention.batch == 0 || attention.heads == 0) return cudaSuccess;
  if (attention.queries == 0) {
    JAXLLM_RETURN_IF_ERROR(zero_keys(stream, attention, dk));
    return zero_keys(stream, attention, dv);
  }
  return launcher_of<T>(attention)(stream, attention, q, k, v, out, lse, dout, dq, dk, dv,
                                   workspace, bias, sums);
}

#define JAXLLM_INSTANTIATE(T)                                                             \
  template int64_t FlashAttentionHopper<T>::backward_workspace(const HopperAttention&);   \
  template int64_t FlashAttentionHopper<T>::bias_partial(const HopperAttention&);         \
  template cudaError_t FlashAttentionHopper<T>::backward(                                 \
      cudaStream_t, const HopperAttention&, HeadRows<const T>, HeadRows<const T>,         \
      HeadRows<const T>, HeadRows<const T>, const float*, HeadRows<const T>, HeadRows<T>, \
      HeadRows<T>, HeadRows<T>, float*, const FlashBias&, const FlashSums&)
JAXLLM_INSTANTIATE(__nv_bfloat16);
JAXLLM_INSTANTIATE(__half);
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
