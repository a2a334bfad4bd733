// FFI handler of decode_attention: checks the buffers, switches on their dtypes, launches.
#include "attention/decode.h"
#include "common/ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// A leading axis of jax.vmap adds sequences, and groups of them with a pool and sinks each. `page`
// is the size of the pages of caches in pages, and 0 of others.
ffi::ErrorOr<DecodeSizes> sizes_of(const Buffer& q, const Buffer& k, const Buffer& lengths,
                                   const Buffer& block_table, int64_t page) {
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_table = block_table.dimensions();
  if (of_q.size() < 3) return ffi::Unexpected(invalid("q", "has too few axes"));
  if (of_k.size() != of_q.size() + 1) {
    return ffi::Unexpected(invalid("k_cache", "has not one axis more than q"));
  }
  const int64_t batch = count(lengths);
  DecodeSizes sizes{batch, of_q[of_q.size() - 2], of_k[of_k.size() - 2], of_k[of_k.size() - 3],
                    of_q.back()};
  for (size_t i = 0; i + 3 < of_q.size(); ++i) sizes.groups *= of_q[i];
  if (of_k.back() != sizes.width || sizes.kv_heads == 0 || sizes.heads % sizes.kv_heads != 0) {
    return ffi::Unexpected(invalid("k_cache", "has heads that do not fit those of q"));
  }
  if (sizes.groups != 0 && batch % sizes.groups != 0) {
    return ffi::Unexpected(invalid("lengths", "does not fit q"));
  }
  if (page != 0) {
    if (of_table.size() == 0) return ffi::Unexpected(invalid("block_table", "has too few axes"));
    if (sizes.length != page) {
      return ffi::Unexpected(invalid("k_cache", "has pages of another size"));
    }
    sizes.pages = of_k[of_k.size() - 4];
    sizes.page = page;
    sizes.length = of_table.back() * page;
    constexpr int64_t kMostPages = INT32_MAX;
    if (sizes.pages > kMostPages) return ffi::Unexpected(invalid("k_cache", "has too many pages"));
    if (sizes.pages == 0 && sizes.length * batch != 0) {
      return ffi::Unexpected(invalid("k_cache", "has no page"));
    }
  }
  constexpr int64_t kMostSequences = 65535, kMostHeads = 65535, kMostColumns = 256;
  if (sizes.heads > kMostHeads) return ffi::Unexpected(invalid("q", "has too many heads"));
  if (batch > kMostSequences) return ffi::Unexpected(invalid("lengths", "has too many sequences"));
  if (sizes.width > kMostColumns) {
    return ffi::Unexpected(invalid("q", "has heads that are too wide"));
  }
  constexpr int64_t kMostTokens = int64_t{1} << 30;
  if (sizes.length > kMostTokens) return ffi::Unexpected(invalid("k_cache", "has too many tokens"));
  return sizes;
}

// Buffers without elements stand for scales, sinks and a block table that are not there. `page` is
// 0 without a block table, `window` 0 for all tokens.
ffi::Error DecodeAttentionImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer lengths,
                               Buffer k_scales, Buffer v_scales, Buffer sinks, Buffer block_table,
                               float scale, int64_t window, int64_t page, int64_t splits,
                               Result out, Result partial) {
  if (splits < 1) return invalid("splits", "is below 1");
  constexpr int64_t kLargest = INT32_MAX;
  if (window < 0 || window > kLargest) return invalid("window", "is not within 0 and 2^31 - 1");
  if (page < 0 || page > kLargest) return invalid("page", "is not within 0 and 2^31 - 1");
  const ffi::ErrorOr<DecodeSizes> found = sizes_of(q, k, lengths, block_table, page);
  if (found.has_error()) return found.error();
  DecodeSizes sizes = *found;
  sizes.window = window;
  const bool quantized = k.element_type() == ffi::S8;
  const int64_t rows = sizes.batch * sizes.heads, entries = page == 0 ? 0 : sizes.length / page;
  const int64_t cached_tokens =
      page == 0 ? sizes.batch * sizes.length : sizes.groups * sizes.pages * page;
  const int64_t cached_rows = cached_tokens * sizes.kv_heads;
  const int64_t cached_scales = quantized ? cached_rows : 0;
  return dispatch_floating(q, "q", [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto cache_type) {
      using C = typename decltype(cache_type)::type;
      return check_and_launch(
          {{"q", q, dtype_of<T>(), rows * sizes.width},
           {"k_cache", k, dtype_of<C>(), cached_rows * sizes.width},
           {"v_cache", v, dtype_of<C>(), cached_rows * sizes.width},
           {"lengths", lengths, ffi::S32, sizes.batch},
           {"k_scales", k_scales, ffi::F32, cached_scales},
           {"v_scales", v_scales, ffi::F32, cached_scales},
           {"sinks", sinks, ffi::F32, sizes.groups * sizes.heads, Elements::kExactlyOrNone},
           {"block_table", block_table, ffi::S32, sizes.batch * entries},
           {"out", *out, dtype_of<T>(), rows * sizes.width},
           {"partial", *partial, ffi::F32, splits > 1 ? splits * rows * (sizes.width + 2) : 0}},
          [&] {
            DecodeArrays<T, C> arrays{data<T>(q),
                                      data<C>(k),
                                      data<C>(v),
                                      data<float>(k_scales),
                                      data<float>(v_scales),
                                      data<int32_t>(lengths),
                                      data<T>(out),
                                      data<float>(partial)};
            if (page != 0) arrays.block_table = data<int32_t>(block_table);
            if (count(sinks) != 0) arrays.sinks = data<float>(sinks);
            return CachedAttention<T, C>::run(stream, arrays, scale, sizes, splits);
          });
    };
    return quantized ? run(Type<int8_t>{}) : run(type);
  });
}

}  // namespace

JAXLLM_HANDLER(DecodeAttention, DecodeAttentionImpl, "scale", "window", "page", "splits");

}  // namespace jaxllm
