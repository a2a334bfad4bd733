// FFI handler of decode_attention: checks the buffers, switches on their dtypes, launches.
#include "attention/decode.h"
#include "common/ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// A leading axis of jax.vmap adds sequences.
ffi::ErrorOr<DecodeSizes> sizes_of(const Buffer& q, const Buffer& k, const Buffer& lengths) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  if (of_q.size() < 3) return ffi::Unexpected(invalid("q", "has too few axes"));
  if (of_k.size() != of_q.size() + 1) {
    return ffi::Unexpected(invalid("k_cache", "has not one axis more than q"));
  }
  const int64_t heads = of_q[of_q.size() - 2], width = of_q.back();
  const int64_t length = of_k[of_k.size() - 3], kv_heads = of_k[of_k.size() - 2];
  const int64_t batch = count(lengths);
  if (of_k.back() != width || kv_heads == 0 || heads % kv_heads != 0) {
    return ffi::Unexpected(invalid("k_cache", "has heads that do not fit those of q"));
  }
  constexpr int64_t kMostSequences = 65535, kMostHeads = 65535, kMostColumns = 256;
  if (heads > kMostHeads) return ffi::Unexpected(invalid("q", "has too many heads"));
  if (batch > kMostSequences) return ffi::Unexpected(invalid("lengths", "has too many sequences"));
  if (width > kMostColumns) return ffi::Unexpected(invalid("q", "has heads that are too wide"));
  constexpr int64_t kMostTokens = int64_t{1} << 30;
  if (length > kMostTokens) return ffi::Unexpected(invalid("k_cache", "has too many tokens"));
  return DecodeSizes{batch, heads, kv_heads, length, width};
}

ffi::Error DecodeAttentionImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer lengths,
                               ffi::RemainingArgs scales, float scale, int64_t splits, Result out,
                               Result partial) {
  const ffi::ErrorOr<DecodeSizes> found = sizes_of(q, k, lengths);
  if (found.has_error()) return found.error();
  const DecodeSizes sizes = *found;
  const bool quantized = k.element_type() == ffi::S8;
  if (splits < 1) return invalid("splits", "is below 1");
  if (scales.size() != (quantized ? 2 : 0)) {
    return invalid("k_scales", "and v_scales come with an int8 cache, and with no other");
  }
  const int64_t rows = sizes.batch * sizes.heads;
  const int64_t cached_rows = sizes.batch * sizes.length * sizes.kv_heads;
  const float* by_token[2] = {nullptr, nullptr};
  for (size_t i = 0; i < scales.size(); ++i) {
    const ffi::ErrorOr<Buffer> buffer = scales.get<Buffer>(i);
    if (buffer.has_error()) return buffer.error();
    const ffi::Error error =
        check_buffers({{i == 0 ? "k_scales" : "v_scales", *buffer, ffi::F32, cached_rows}});
    if (error.failure()) return error;
    by_token[i] = data<float>(*buffer);
  }
  return dispatch_floating(q, "q", [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto cache_type) {
      using C = typename decltype(cache_type)::type;
      return check_and_launch(
          {{"q", q, dtype_of<T>(), rows * sizes.width},
           {"k_cache", k, dtype_of<C>(), cached_rows * sizes.width},
           {"v_cache", v, dtype_of<C>(), cached_rows * sizes.width},
           {"lengths", lengths, ffi::S32, sizes.batch},
           {"out", *out, dtype_of<T>(), rows * sizes.width},
           {"partial", *partial, ffi::F32, splits > 1 ? splits * rows * (sizes.width + 2) : 0}},
          [&] {
            return CachedAttention<T, C>::run(
                stream, data<T>(q), data<C>(k), data<C>(v), by_token[0], by_token[1],
                data<int32_t>(lengths), scale, data<T>(out), data<float>(partial), sizes, splits);
          });
    };
    return quantized ? run(Type<int8_t>{}) : run(type);
  });
}

}  // namespace

JAXLLM_HANDLER(DecodeAttention, DecodeAttentionImpl, "scale", "splits");

}  // namespace jaxllm
