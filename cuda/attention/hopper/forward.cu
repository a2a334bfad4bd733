// The launchers of the forward on Hopper: the workspace, the tile that suits a call, the tensor
// maps.
#include <algorithm>

#include "attention/hopper/kernel_forward.cuh"
#include "attention/hopper/launch.h"
#include "common/zero_counter.cuh"

namespace jaxllm::attention {
namespace {

using namespace hopper;

// The parts of the workspace, in ints: the tile counter, and with segments the key tiles that each
// query tile visits.
constexpr int64_t kKeyTilesAt = 4;

template <class Traits>
int64_t workspace_size(const FlashShape& shape, const FlashOptions& options) {
  if (options.query_segments == nullptr) return kKeyTilesAt;
  constexpr int64_t kRange = sizeof(TileRange) / sizeof(int);
  return kKeyTilesAt + shape.batch * divide_up(shape.queries, Traits::kBlockM) * kRange;
}

// A CTA an SM, which takes tiles until there are none.
template <typename T, class Traits, bool kSegments, bool kSoftcap>
cudaError_t launch(cudaStream_t stream, const FlashForward<T>& call) {
  const FlashShape& shape = call.shape;
  const FlashOptions& options = call.options;
  const auto kernel = flash_attention_forward_hopper_kernel<T, Traits, kSegments, kSoftcap>;
  static_assert(sizeof(ForwardSmem<T, Traits>) <= 227 << 10);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));

  CUtensorMap q_map, k_map, v_map, out_map;
  JAXLLM_RETURN_IF_ERROR(map_queries(shape, call.q, 64, &q_map));
  JAXLLM_RETURN_IF_ERROR(map_keys(shape, call.k, Traits::kBlockN, &k_map));
  JAXLLM_RETURN_IF_ERROR(map_values(shape, call.v, Traits::kBlockN, &v_map));
  JAXLLM_RETURN_IF_ERROR(map_outputs(shape, call.out, 64, &out_map));

  const int64_t query_tiles = divide_up(shape.queries, Traits::kBlockM);
  const int64_t tiles = query_tiles * shape.batch * shape.heads;
  if (tiles > kMaxTiles) return cudaErrorNotSupported;
  const LocalMask mask = make_local_mask(shape, options);
  int* const tile_counter = static_cast<int*>(options.scratch.data);
  auto* const key_tiles = reinterpret_cast<TileRange*>(tile_counter + kKeyTilesAt);
  if constexpr (kSegments) {
    JAXLLM_RETURN_IF_ERROR((launch_segment_tiles<Traits::kBlockM, Traits::kBlockN>(
        stream, shape.batch, mask, options.segment_ranges, key_tiles, /*query_tiles=*/nullptr)));
  }
  const ForwardParams params{
      mask,
      static_cast<int>(shape.batch),
      static_cast<int>(shape.heads),
      static_cast<int>(shape.kv_heads),
      static_cast<int>(query_tiles),
      static_cast<int>(tiles),
      query_heads_at_a_time(shape, sizeof(T)),
      order_of_queries(shape, options),
      kSoftcap ? options.softcap : options.scale,
      Softcap::of(options.scale, options.softcap),
      Sinks::of_groups(options.sinks.data, options.sinks.groups, shape.batch, shape.heads),
      call.lse,
      tile_counter,
      {options.query_segments, options.key_segments, options.segment_ranges, key_tiles,
       /*query_tiles=*/nullptr}};
  JAXLLM_RETURN_IF_ERROR(zero_counter(stream, tile_counter));
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, limits.sms)));
  const Launch launch{grid, dim3(Traits::kThreads), sizeof(ForwardSmem<T, Traits>), /*cluster=*/1,
                      /*pdl=*/true};
  return launch_kernel(stream, kernel, launch, q_map, k_map, v_map, out_map, params);
}

// Whether even the last query sees few keys.
bool has_few_keys(const FlashShape& shape, const FlashOptions& options) {
  constexpr int64_t kFew = 1536;
  const LocalMask mask = make_local_mask(shape, options);
  return std::min(shape.keys, int64_t{mask.left} + mask.right + 1) < kFew;
}

}  // namespace

template <typename T>
bool forward_is_for_hopper(const FlashForward<T>& call) {
  // Of the traits for a width, the most query tiles.
  const int64_t workspace = call.shape.width <= 64
                                ? workspace_size<ForwardHdim64>(call.shape, call.options)
                                : workspace_size<ForwardHdim128>(call.shape, call.options);
  return is_for_hopper<T>(flash_attention_forward_hopper_kernel<T, ForwardHdim128, false, false>,
                          call.shape, call.options, {call.q, call.k},
                          {call.v, read_only(call.out)}) &&
         call.options.scratch.bytes >= int64_t{sizeof(int)} * workspace;
}

template <typename T>
cudaError_t forward_by_hopper(cudaStream_t stream, const FlashForward<T>& call) {
  const auto with = [&](auto segments, auto softcap) {
    constexpr bool kSegments = segments, kSoftcap = softcap;
    if (call.shape.value_width != call.shape.width) {
      if constexpr (kSoftcap) {
        return cudaErrorNotSupported;  // is_for_hopper() is false
      } else {
        using Traits =
            std::conditional_t<kSegments, ForwardHdim192Value128Segments, ForwardHdim192Value128>;
        return launch<T, Traits, kSegments, false>(stream, call);
      }
    }
    if (call.shape.width > 192) {
      using Traits = std::conditional_t<kSegments, ForwardHdim256Segments, ForwardHdim256>;
      return launch<T, Traits, kSegments, kSoftcap>(stream, call);
    }
    if (call.shape.width > 128) return launch<T, ForwardHdim192, kSegments, kSoftcap>(stream, call);
    if (call.shape.width > 96) return launch<T, ForwardHdim128, kSegments, kSoftcap>(stream, call);
    if (call.shape.width > 64) return launch<T, ForwardHdim96, kSegments, kSoftcap>(stream, call);
    // Documents are shorter than their sequence.
    if constexpr (kSegments) return launch<T, ForwardHdim64FewKeys, true, kSoftcap>(stream, call);
    return has_few_keys(call.shape, call.options)
               ? launch<T, ForwardHdim64FewKeys, false, kSoftcap>(stream, call)
               : launch<T, ForwardHdim64, false, kSoftcap>(stream, call);
  };
  const auto with_softcap = [&](auto segments) {
    return call.options.softcap == 0.0f ? with(segments, std::false_type{})
                                        : with(segments, std::true_type{});
  };
  return call.options.query_segments == nullptr ? with_softcap(std::false_type{})
                                                : with_softcap(std::true_type{});
}

template bool forward_is_for_hopper(const FlashForward<__nv_bfloat16>&);
template bool forward_is_for_hopper(const FlashForward<__half>&);
template cudaError_t forward_by_hopper(cudaStream_t, const FlashForward<__nv_bfloat16>&);
template cudaError_t forward_by_hopper(cudaStream_t, const FlashForward<__half>&);

}  // namespace jaxllm::attention
