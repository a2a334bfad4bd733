// FFI handler of decode_attention: checks the buffers, switches on their dtypes, launches.
#include "attention/decode.h"
#include "common/ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// jax.vmap's new leading axis is more sequences.
ffi::ErrorOr<DecodeSizes> sizes_of(const Buffer& q, const Buffer& k, const Buffer& lengths) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  const auto refuse = [](const char* why) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(why));
  };
  if (of_q.size() < 3 || of_k.size() != of_q.size() + 1) return refuse("q or k_cache has no batch");
  const int64_t heads = of_q[of_q.size() - 2], width = of_q.back();
  const int64_t length = of_k[of_k.size() - 3], kv_heads = of_k[of_k.size() - 2];
  const int64_t batch = lengths.element_count();
  if (of_k.back() != width || kv_heads == 0 || heads % kv_heads != 0) {
    return refuse("the heads of q and k_cache do not fit together");
  }
  if (static_cast<int64_t>(q.element_count()) != batch * heads * width ||
      static_cast<int64_t>(k.element_count()) != batch * length * kv_heads * width) {
    return refuse("q, k_cache and lengths differ in their number of sequences");
  }
  if (batch > 65535 || width > 256) return refuse("too many sequences, or too wide heads");
  return DecodeSizes{batch, heads, kv_heads, length, width};
}

ffi::Error DecodeAttentionImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer lengths,
                               ffi::RemainingArgs scales, float scale, int64_t splits, Result out,
                               Result partial) {
  const ffi::ErrorOr<DecodeSizes> sizes = sizes_of(q, k, lengths);
  if (sizes.has_error()) return sizes.error();
  const bool quantized = k.element_type() == ffi::S8;
  if (v.element_type() != k.element_type() || v.element_count() != k.element_count()) {
    return ffi::Error::InvalidArgument("v_cache is not like k_cache");
  }
  if (lengths.element_type() != ffi::S32) return ffi::Error::InvalidArgument("lengths: not int32");
  if (!quantized && k.element_type() != q.element_type()) {
    return ffi::Error::InvalidArgument("k_cache has neither the dtype of q nor int8");
  }
  const int64_t needed = sizes->batch * sizes->heads * (sizes->width + 2) * splits;
  if (splits < 1 || (splits > 1 && static_cast<int64_t>(partial->element_count()) < needed)) {
    return ffi::Error::InvalidArgument("partial has no room for the splits");
  }
  const float* by_token[2] = {nullptr, nullptr};
  for (size_t i = 0; quantized && i < 2; ++i) {
    const ffi::ErrorOr<Buffer> buffer = scales.get<Buffer>(i);
    if (buffer.has_error()) return buffer.error();
    if (buffer->element_type() != ffi::F32 ||
        buffer->element_count() * sizes->width != k.element_count()) {
      return ffi::Error::InvalidArgument("scales are not float32, one a head of k_cache");
    }
    by_token[i] = data<float>(*buffer);
  }
  return dispatch_floating(q.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto cache_type) {
      using C = typename decltype(cache_type)::type;
      return to_ffi_error(CachedAttention<T, C>::run(
          stream, data<T>(q), data<C>(k), data<C>(v), by_token[0], by_token[1],
          data<int32_t>(lengths), scale, data<T>(out), data<float>(partial), *sizes, splits));
    };
    return quantized ? run(Type<int8_t>{}) : run(type);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeAttention, DecodeAttentionImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()            // q
                                  .Arg<Buffer>()            // k_cache
                                  .Arg<Buffer>()            // v_cache
                                  .Arg<Buffer>()            // lengths
                                  .RemainingArgs()          // k_scales, v_scales
                                  .Attr<float>("scale")     //
                                  .Attr<int64_t>("splits")  //
                                  .Ret<Buffer>()            // out
                                  .Ret<Buffer>(),           // partial
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
