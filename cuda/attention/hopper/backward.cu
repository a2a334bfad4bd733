// The launchers of the backward on Hopper: the workspace, the order of tiles, and the kernels one
// after the other.
#include <algorithm>
#include <cstddef>

#include "attention/hopper/kernel_backward.cuh"
#include "attention/hopper/kernel_dq.cuh"
#include "attention/hopper/launch.h"
#include "attention/hopper/preprocess_backward.cuh"

namespace jaxllm::attention {
namespace {

using namespace hopper;

// Whether tickets go through each head's order from its first step to its last. Then a tile waits
// for tiles with earlier tickets only, and there is no deadlock.
constexpr bool is_in_order(int heads, int key_tiles, int split, int heads_at_a_time) {
  int steps[8] = {};  // of each head, so far
  for (int ticket = 0; ticket < heads * key_tiles; ++ticket) {
    const TileCoord at = tile_coord_in_halves(ticket, heads, key_tiles, split, heads_at_a_time);
    if (at.row < 0 || at.row >= heads || at.column != steps[at.row]) return false;
    ++steps[at.row];
  }
  for (int head = 0; head < heads; ++head) {
    if (steps[head] != key_tiles) return false;
  }
  return true;
}
static_assert(is_in_order(1, 256, 128, 1) && is_in_order(8, 32, 16, 8) && is_in_order(7, 9, 5, 3) &&
              is_in_order(5, 2, 1, 4) && is_in_order(3, 6, 3, 16) && is_in_order(4, 3, 2, 1));

// The parts of the workspace, in floats.
struct Workspace {
  int64_t rows, dq_accum, semaphores;
  int64_t query_tiles, key_tiles;  // with segments
  int64_t tile_counters;

  template <class Traits>
  static Workspace of(const FlashShape& shape, const FlashOptions& options) {
    const int64_t query_tiles = shape.batch * divide_up(shape.queries, Traits::kBlockM);
    const int64_t tiles = query_tiles * shape.heads;
    const int64_t rows = tiles * Traits::kBlockM;
    const bool segments = options.query_segments != nullptr;
    const int64_t key_tiles = segments ? shape.batch * divide_up(shape.keys, Traits::kBlockN) : 0;
    if constexpr (Traits::kSeparateDq) {
      constexpr int kBlockM = DqTraits<Traits::kHeadDim, Traits::kValueDim>::kBlockM;
      return {rows,      0, 0, segments ? shape.batch * divide_up(shape.queries, kBlockM) : 0,
              key_tiles, 2};
    }
    return {rows, rows * Traits::kColumns, tiles, segments ? query_tiles : 0, key_tiles, 1};
  }

  static constexpr int64_t kRange = sizeof(TileRange) / sizeof(float);
  int64_t delta_at() const { return rows; }
  int64_t dq_accum_at() const { return 2 * rows; }
  int64_t query_tiles_at() const { return dq_accum_at() + dq_accum; }
  int64_t key_tiles_at() const { return query_tiles_at() + key_tiles * kRange; }
  int64_t semaphores_at() const { return key_tiles_at() + query_tiles * kRange; }
  int64_t tile_counter_at() const { return semaphores_at() + semaphores; }
  int64_t size() const { return tile_counter_at() + tile_counters; }
};

// The partial column sums for the gradient of a bias, in rows of one head.
template <class Traits>
struct BiasPartial {
  static constexpr int kHeadDim = Traits::kHeadDim;
  int64_t query_tiles, heads, kv_heads;

  explicit BiasPartial(const FlashShape& shape)
      : query_tiles(shape.batch * divide_up(shape.queries, Traits::kBlockM)),
        heads(shape.heads),
        kv_heads(shape.kv_heads) {}

  int64_t dq_rows() const { return query_tiles * Traits::kDqColumnSums; }
  int64_t dout_rows() const { return query_tiles * (heads / kv_heads); }
  int64_t dq_size() const { return dq_rows() * heads * kHeadDim; }
  int64_t size() const { return dq_size() + dout_rows() * kv_heads * kHeadDim; }

  template <typename T>
  cudaError_t sum(cudaStream_t stream, const FlashBias& bias, const float* dout_sums) const {
    const int64_t dq_columns = heads * kHeadDim, dout_columns = kv_heads * kHeadDim;
    const dim3 grid((dq_columns + 2 * dout_columns) / 32, bias.groups);
    return launch_kernel(stream, flash_attention_backward_hopper_bias_kernel<T>,
                         {grid, kColumnSumThreads}, bias.partial, dout_sums,
                         static_cast<T*>(bias.gradient), dq_rows() / bias.groups,
                         dout_rows() / bias.groups, dq_columns, dout_columns);
  }
};

// The order of tiles: see tile_scheduler.cuh.
struct TileOrder {
  int split;
  int64_t heads_at_a_time;
};

template <typename T, class Traits, bool kSegments>
TileOrder choose_order(const FlashShape& shape, const LocalMask& mask, int64_t key_tiles,
                       int64_t tiles, int sms) {
  // In halves where the mask makes tiles of unequal length, where they are more than run at once
  // but so few that the end of the grid counts, and where the first half of a head runs at once. In
  // a simulation of the additions' order on 132 SMs, the share of the time in which they work is
  // 0.95 in halves and 0.87 without for 32 key heads of 32 tiles, each of four heads; but 0.81 and
  // 0.95 for 384 heads of 8 tiles.
  const bool is_triangle =
      !kSegments && mask.right < mask.keys && mask.left >= mask.queries + mask.keys;
  const int64_t half = (key_tiles + 1) / 2;
  constexpr int64_t kFewTiles = 16;  // to an SM
  if (!Traits::kSeparateDq && is_triangle && half <= sms && tiles > sms &&
      tiles < kFewTiles * sms) {
    return {static_cast<int>(half), sms / half};  // as many heads as fill the grid with their first
  }
  // As many heads as fill the grid twice, but no more than have what they read and add up in the L2
  // cache together. With documents the tiles at work have but a part of that.
  const int64_t bytes_of_row = (shape.width + shape.value_width) * sizeof(T);
  const int64_t bytes_of_query =
      bytes_of_row + (Traits::kSeparateDq ? 0 : shape.width * sizeof(float));
  const int64_t bytes_of_head =
      shape.heads / shape.kv_heads * shape.queries * bytes_of_query + shape.keys * bytes_of_row;
  const int64_t filling = divide_up(2 * sms, key_tiles);
  // Where nothing is added up, from the first key tile on, which under a causal mask is the
  // longest.
  return {Traits::kSeparateDq ? 0 : static_cast<int>(key_tiles),
          kSegments ? filling : std::clamp<int64_t>(kL2Bytes / bytes_of_head, 1, filling)};
}

// The kernel for dq, behind the backward kernel and beside the end of it.
template <typename T, class Traits, bool kSegments, bool kSoftcap>
cudaError_t launch_dq(cudaStream_t stream, const FlashBackward<T>& call,
                      const BackwardParams& backward, int sms, int padded_queries) {
  const FlashShape& shape = call.shape;
  const auto kernel = flash_attention_backward_hopper_dq_kernel<T, Traits, kSegments, kSoftcap>;
  using Smem = DqSmem<T, Traits>;
  static_assert(sizeof(Smem) <= 227 << 10);
  static_assert(offsetof(Smem, v) % kSwizzleAtomBytes == 0);
  CUtensorMap q_map, k_map, v_map, dout_map, dq_map;
  JAXLLM_RETURN_IF_ERROR(map_queries(shape, call.q, 64, &q_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(shape, call.k, Traits::kBlockN, &k_map));
  JAXLLM_RETURN_IF_ERROR(map_values(shape, call.v, Traits::kBlockN, &v_map));
  JAXLLM_RETURN_IF_ERROR(map_outputs(shape, call.dout, 64, &dout_map));
  JAXLLM_RETURN_IF_ERROR(map_queries(shape, call.dq, 64, &dq_map));

  const int64_t query_tiles = divide_up(shape.queries, Traits::kBlockM);
  const int64_t tiles = query_tiles * shape.batch * shape.heads;
  if (tiles > kMaxTiles) return cudaErrorNotSupported;
  const DqParams params{backward.mask,
                        static_cast<int>(shape.batch),
                        static_cast<int>(shape.heads),
                        static_cast<int>(shape.kv_heads),
                        static_cast<int>(query_tiles),
                        static_cast<int>(tiles),
                        query_heads_at_a_time(shape, sizeof(T)),
                        backward.q_order,
                        padded_queries,
                        backward.scale,
                        backward.score_scale,
                        backward.softcap,
                        backward.lse,
                        backward.delta,
                        backward.tile_counter + 1,
                        backward.segments};
  const Launch launch{dim3(static_cast<unsigned>(std::min<int64_t>(tiles, sms))),
                      dim3(Traits::kThreads), sizeof(Smem), /*cluster=*/1, /*pdl=*/true};
  return launch_kernel(stream, kernel, launch, q_map, k_map, v_map, dout_map, dq_map, params);
}

template <typename T, class Traits, bool kSegments, bool kSoftcap>
cudaError_t launch(cudaStream_t stream, const FlashBackward<T>& call) {
  const FlashShape& shape = call.shape;
  const FlashOptions& options = call.options;
  const auto kernel = flash_attention_backward_hopper_kernel<T, Traits, kSegments, kSoftcap>;
  using Smem = BackwardSmem<T, Traits>;
  constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= 227 << 10);
  // TMA and wgmma address whole atoms of the swizzle.
  static_assert(offsetof(Smem, ds) % kSwizzleAtomBytes == 0 &&
                (!Traits::kStoresDq || offsetof(Smem, dq_store) % kSwizzleAtomBytes == 0));
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  auto* const workspace = static_cast<float*>(options.scratch.data);
  const FlashBias& bias = options.bias;
  const bool has_bias = hopper_sums_bias(shape, options);
  if (!aligned_16(bias.partial) ||
      reinterpret_cast<std::uintptr_t>(workspace) % kCacheLineBytes != 0) {
    return cudaErrorNotSupported;
  }

  CUtensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map, dq_map;
  JAXLLM_RETURN_IF_ERROR(map_queries(shape, call.q, Traits::kBlockM, &q_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(shape, call.k, Traits::kBlockN, &k_map));
  JAXLLM_RETURN_IF_ERROR(map_values(shape, call.v, Traits::kBlockN, &v_map));
  JAXLLM_RETURN_IF_ERROR(map_outputs(shape, call.dout, Traits::kBlockM, &dout_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(shape, call.dk, 64, &dk_map));
  JAXLLM_RETURN_IF_ERROR(map_values(shape, call.dv, 64, &dv_map));
  JAXLLM_RETURN_IF_ERROR(map_queries(shape, call.dq, Traits::kBlockM, &dq_map));

  const LocalMask mask = make_local_mask(shape, options);
  const TiledMask<Traits::kBlockM, Traits::kBlockN> tiled(mask);
  const int key_tiles = tiled.key_tiles(), query_tiles = tiled.query_tiles();
  const int padded_queries = query_tiles * Traits::kBlockM;
  const Workspace parts = Workspace::of<Traits>(shape, options);
  const int64_t tiles = shape.batch * shape.kv_heads * key_tiles;
  if (tiles > kMaxTiles || parts.semaphores > kMaxTiles) return cudaErrorNotSupported;
  const TileOrder order =
      choose_order<T, Traits, kSegments>(shape, mask, key_tiles, tiles, limits.sms);

  auto* const seen_query_tiles = reinterpret_cast<TileRange*>(workspace + parts.query_tiles_at());
  auto* const seen_key_tiles = reinterpret_cast<TileRange*>(workspace + parts.key_tiles_at());
  if constexpr (kSegments) {
    if constexpr (Traits::kSeparateDq) {
      using OfDq = DqTraits<Traits::kHeadDim, Traits::kValueDim>;
      JAXLLM_RETURN_IF_ERROR((launch_segment_tiles<Traits::kBlockM, Traits::kBlockN>(
          stream, shape.batch, mask, options.segment_ranges, nullptr, seen_query_tiles)));
      JAXLLM_RETURN_IF_ERROR((launch_segment_tiles<OfDq::kBlockM, OfDq::kBlockN>(
          stream, shape.batch, mask, options.segment_ranges, seen_key_tiles, nullptr)));
    } else {
      JAXLLM_RETURN_IF_ERROR((launch_segment_tiles<Traits::kBlockM, Traits::kBlockN>(
          stream, shape.batch, mask, options.segment_ranges, seen_key_tiles, seen_query_tiles)));
    }
  }
  const BiasPartial<Traits> partial(shape);
  const FlashSums& sums = options.sums;
  constexpr bool kTakesSums = Traits::kHeadDim == 64;  // as the blocks of GPT-2 have them
  const bool has_sums = kTakesSums && sums.delta != nullptr && has_bias &&
                        shape.heads == shape.kv_heads && shape.queries % Traits::kBlockM == 0;
  float* const dout_sums = has_sums   ? const_cast<float*>(sums.dout)
                           : has_bias ? bias.partial + partial.dq_size()
                                      : nullptr;
  const BackwardParams params{
      mask,
      static_cast<int>(shape.heads),
      static_cast<int>(shape.kv_heads),
      order_of_queries(shape, options),
      static_cast<int>(shape.value_width),
      options.scale,
      kSoftcap ? options.softcap : options.scale,
      Softcap::of(options.scale, options.softcap),
      order.split,
      workspace,
      has_sums ? const_cast<float*>(sums.delta) : workspace + parts.delta_at(),
      workspace + parts.dq_accum_at(),
      reinterpret_cast<int*>(workspace + parts.semaphores_at()),
      reinterpret_cast<int*>(workspace + parts.tile_counter_at()),
      static_cast<int>(tiles),
      // To begin with what was written or read last: the GEMM that makes the sums ends with the
      // last sequences, and the preprocess kernel with the first.
      /*from_last=*/has_sums,
      static_cast<int>(order.heads_at_a_time),
      {options.query_segments, options.key_segments, options.segment_ranges, seen_key_tiles,
       seen_query_tiles},
      has_bias ? bias.partial : nullptr,
      dout_sums};
  if (has_sums) {
    const dim3 grid(divide_up(padded_queries, kRowThreads), shape.heads, shape.batch);
    if constexpr (kTakesSums) {
      JAXLLM_RETURN_IF_ERROR(
          launch_kernel(stream, flash_attention_backward_hopper_lse_kernel<T, Traits, kSegments>,
                        {grid, kRowThreads}, params, call.lse, call.dq));
    }
  } else {
    constexpr int kRowsAtOnce = kRowThreads / kRowGroup<T, Traits>;
    const dim3 grid(padded_queries / (has_bias ? Traits::kBlockM : kRowsAtOnce), shape.heads,
                    shape.batch);
    auto preprocess =
        flash_attention_backward_hopper_preprocess_kernel<T, Traits, kSegments, false>;
    if constexpr (Traits::kSumsBias) {
      if (has_bias) {
        preprocess = flash_attention_backward_hopper_preprocess_kernel<T, Traits, kSegments, true>;
      }
    }
    JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, preprocess, {grid, kRowThreads}, params, call.out,
                                         call.dout, call.lse, call.dlse, call.delta, call.dq));
  }
  const Launch launch{dim3(static_cast<unsigned>(std::min<int64_t>(tiles, limits.sms))),
                      dim3(Traits::kThreads), kSmemBytes, /*cluster=*/1, /*pdl=*/true};
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, kernel, launch, q_map, k_map, v_map, dout_map,
                                       dk_map, dv_map, dq_map, params));
  if constexpr (Traits::kSeparateDq) {
    return launch_dq<T, DqTraits<Traits::kHeadDim, Traits::kValueDim>, kSegments, kSoftcap>(
        stream, call, params, limits.sms, padded_queries);
  } else if constexpr (!Traits::kStoresDq) {
    const dim3 grid(query_tiles, shape.heads, shape.batch);
    auto postprocess =
        flash_attention_backward_hopper_postprocess_kernel<T, Traits, kSegments, false>;
    if (has_bias) {
      postprocess = flash_attention_backward_hopper_postprocess_kernel<T, Traits, kSegments, true>;
    }
    JAXLLM_RETURN_IF_ERROR(
        launch_kernel(stream, postprocess, {grid, kRowThreads}, params, call.dq));
  }
  return has_bias ? partial.template sum<T>(stream, bias, dout_sums) : cudaSuccess;
}

// Without queries keys and values have no gradient.
template <typename T>
cudaError_t zero_keys(cudaStream_t stream, const FlashShape& shape, HeadRows<T> gradient,
                      int64_t width) {
  return cudaMemset2DAsync(gradient.data, gradient.row_stride * sizeof(T), 0,
                           shape.kv_heads * width * sizeof(T), shape.batch * shape.keys, stream);
}

template <typename T, class Traits>
bool is_for_traits(const FlashBackward<T>& call) {
  const FlashOptions& options = call.options;
  return is_for_hopper<T>(flash_attention_backward_hopper_kernel<T, Traits, false, false>,
                          call.shape, options,
                          {call.q, call.k, read_only(call.dq), read_only(call.dk)},
                          {call.v, call.out, call.dout, read_only(call.dv)}) &&
         options.scratch.bytes >=
             int64_t{sizeof(float)} * Workspace::of<Traits>(call.shape, options).size() &&
         (!hopper_sums_bias(call.shape, options) ||
          options.bias.partial_size >= BiasPartial<Traits>(call.shape).size());
}

// Calls `run` with the traits for the widths of a call.
template <class Run>
auto with_traits(const FlashShape& shape, const Run& run) {
  const int64_t width = shape.width;
  if (shape.value_width != width) {
    return run(BackwardTraits<kFlashLatentWidth, kFlashLatentValueWidth>{});
  }
  if (width <= 64) return run(BackwardTraits<64>{});
  if (width <= 96) return run(BackwardTraits<96>{});
  if (width <= 128) return run(BackwardTraits<128>{});
  return width <= 192 ? run(BackwardTraits<192>{}) : run(BackwardTraits<256>{});
}

}  // namespace

template <typename T>
bool backward_is_for_hopper(const FlashBackward<T>& call) {
  return with_traits(call.shape,
                     [&](auto traits) { return is_for_traits<T, decltype(traits)>(call); });
}

template <typename T>
cudaError_t backward_by_hopper(cudaStream_t stream, const FlashBackward<T>& call) {
  if (call.shape.queries == 0) {
    JAXLLM_RETURN_IF_ERROR(zero_keys(stream, call.shape, call.dk, call.shape.width));
    return zero_keys(stream, call.shape, call.dv, call.shape.value_width);
  }
  const bool segments = call.options.query_segments != nullptr;
  const bool softcap = call.options.softcap != 0.0f;
  return with_traits(call.shape, [&](auto traits) {
    using Traits = decltype(traits);
    if constexpr (Traits::kTakesSoftcap) {
      if (softcap) {
        return segments ? launch<T, Traits, true, true>(stream, call)
                        : launch<T, Traits, false, true>(stream, call);
      }
    }
    return segments ? launch<T, Traits, true, false>(stream, call)
                    : launch<T, Traits, false, false>(stream, call);
  });
}

template bool backward_is_for_hopper(const FlashBackward<__nv_bfloat16>&);
template bool backward_is_for_hopper(const FlashBackward<__half>&);
template cudaError_t backward_by_hopper(cudaStream_t, const FlashBackward<__nv_bfloat16>&);
template cudaError_t backward_by_hopper(cudaStream_t, const FlashBackward<__half>&);

}  // namespace jaxllm::attention
