// FFI handlers of the attention kernels: check the buffers, switch on their dtypes, launch.
#include "common/ffi.h"

#include "attention/flash_attention.h"
#include "attention/repeat_kv.h"
#include "attention/softmax.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Rows of scores, `length` of them to a mask. jax.vmap's new leading axis is more rows.
struct Rows {
  int64_t rows, width, length;
};

ffi::ErrorOr<Rows> rows_of(const Buffer& x, bool causal) {
  const auto dimensions = x.dimensions();
  const size_t axes = dimensions.size();
  if (axes < (causal ? 2 : 1)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("x has too few axes"));
  }
  const int64_t width = dimensions[axes - 1];
  if (x.element_count() == 0) return Rows{0, width, 1};
  // Without a mask every row sees all, as the last of its queries does.
  const int64_t length = causal ? dimensions[axes - 2] : 1;
  return Rows{static_cast<int64_t>(x.element_count()) / width, width, length};
}

ffi::Error SoftmaxForwardImpl(cudaStream_t stream, Buffer x, float scale, bool causal, Result out) {
  const ffi::ErrorOr<Rows> rows = rows_of(x, causal);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Softmax<T>::forward(stream, data<T>(x), scale, data<T>(out), rows->rows,
                                            rows->width, rows->length));
  });
}

ffi::Error SoftmaxBackwardImpl(cudaStream_t stream, Buffer out, Buffer dout, float scale,
                               bool causal, Result dx) {
  const ffi::ErrorOr<Rows> rows = rows_of(out, causal);
  if (rows.has_error()) return rows.error();
  if (dout.element_type() != out.element_type() || dout.element_count() != out.element_count()) {
    return ffi::Error::InvalidArgument("dout is not like out");
  }
  return dispatch_floating(out.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Softmax<T>::backward(stream, data<T>(out), data<T>(dout), scale,
                                             data<T>(dx), rows->rows, rows->width, rows->length));
  });
}

// Heads of `width` elements.
struct Heads {
  int64_t heads, width;
};

ffi::ErrorOr<Heads> heads_of(const Buffer& one, const Buffer& copies, int64_t groups) {
  if (one.dimensions().size() == 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("x is a scalar"));
  }
  if (copies.element_count() != one.element_count() * groups) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("out has not groups times the heads of x"));
  }
  if (one.element_count() == 0) return Heads{0, 0};
  const int64_t width = one.dimensions().back();
  return Heads{static_cast<int64_t>(one.element_count()) / width, width};
}

ffi::Error RepeatKvForwardImpl(cudaStream_t stream, Buffer x, int64_t groups, Result out) {
  const ffi::ErrorOr<Heads> heads = heads_of(x, *out, groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        RepeatKv<T>::forward(stream, data<T>(x), data<T>(out), heads->heads, heads->width, groups));
  });
}

ffi::Error RepeatKvBackwardImpl(cudaStream_t stream, Buffer dout, int64_t groups, Result dx) {
  const ffi::ErrorOr<Heads> heads = heads_of(*dx, dout, groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(dout.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(RepeatKv<T>::backward(stream, data<T>(dout), data<T>(dx), heads->heads,
                                              heads->width, groups));
  });
}

// The sizes of q (..., T, N, H) and k (..., S, K, H). jax.vmap's new leading axis is more
// sequences.
ffi::ErrorOr<FlashShape> flash_shape_of(const Buffer& q, const Buffer& k, const Buffer& v) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  const size_t axes = of_q.size();
  if (axes < 3 || of_k.size() != axes) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("q or k has too few axes"));
  }
  FlashShape shape{
      1, of_q[axes - 3], of_k[axes - 3], of_q[axes - 2], of_k[axes - 2], of_q[axes - 1]};
  for (size_t i = 0; i + 3 < axes; ++i) shape.batch *= of_q[i];
  const int64_t of_keys = shape.batch * shape.keys * shape.kv_heads * shape.width;
  if (of_keys != static_cast<int64_t>(k.element_count()) ||
      v.element_count() != k.element_count() || shape.kv_heads == 0 ||
      shape.heads % shape.kv_heads != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the shapes of q, k and v do not fit"));
  }
  return shape;
}

// The sizes of a projection (..., T, (N + 2K) H) into queries, keys and values.
ffi::ErrorOr<FlashShape> packed_shape_of(const Buffer& qkv, ffi::Dictionary attributes) {
  const auto axes = qkv.dimensions();
  const auto of_heads = attributes.get<int64_t>("heads");
  const auto of_kv_heads = attributes.get<int64_t>("kv_heads");
  if (!of_heads) return ffi::Unexpected(of_heads.error());
  if (!of_kv_heads) return ffi::Unexpected(of_kv_heads.error());
  const int64_t heads = *of_heads, kv_heads = *of_kv_heads;
  if (axes.size() < 2 || heads < 1 || kv_heads < 1 || heads % kv_heads != 0 ||
      axes.back() % (heads + 2 * kv_heads) != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("qkv does not fit its heads"));
  }
  const int64_t length = axes[axes.size() - 2];
  FlashShape shape{1, length, length, heads, kv_heads, axes.back() / (heads + 2 * kv_heads)};
  for (size_t i = 0; i + 2 < axes.size(); ++i) shape.batch *= axes[i];
  return shape;
}

// The workspaces of either direction.
struct FlashWorkspaces {
  Result &segment_ranges, &turned, &scratch;
};

// The options of a call. Behind its arrays come, where `rope` says so, the cosines and sines of the
// positions; and of segments none or two arrays, the queries' and the keys'.
ffi::ErrorOr<FlashOptions> flash_options_of(const FlashShape& shape, ffi::Dictionary attributes,
                                            ffi::RemainingArgs extras, FlashWorkspaces workspaces) {
  const auto scale = attributes.get<float>("scale"), softcap = attributes.get<float>("softcap");
  const auto causal = attributes.get<bool>("causal"), rope = attributes.get<bool>("rope");
  const auto interleaved = attributes.get<bool>("interleaved");
  const auto window = attributes.get<int64_t>("window");
  if (!scale || !softcap || !causal || !rope || !interleaved || !window) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("an attribute of attention is missing"));
  }
  FlashOptions options{};
  options.scale = *scale;
  options.causal = *causal;
  options.window = *window;
  options.softcap = *softcap;
  options.scratch = {workspaces.scratch->untyped_data(),
                     static_cast<int64_t>(workspaces.scratch->size_bytes())};
  size_t extra = 0;
  if (*rope) {
    const auto cos = extras.get<Buffer>(0), sin = extras.get<Buffer>(1);
    if (!cos || !sin || cos->dimensions().size() < 2 || cos->element_type() != ffi::F32 ||
        sin->element_type() != ffi::F32 || sin->element_count() != cos->element_count()) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("cos or sin is no float32 table"));
    }
    const int64_t elements = cos->element_count(), pairs = cos->dimensions().back();
    const int64_t table = shape.queries * pairs;
    if (elements != 0 && (table == 0 || elements % table != 0)) {
      return ffi::Unexpected(ffi::Error::InvalidArgument("cos does not fit q"));
    }
    if (elements != 0) {  // else there is nothing to turn
      options.rope = {data<float>(*cos), data<float>(*sin),
                      elements / table,  pairs,
                      *interleaved,      workspaces.turned->untyped_data()};
    }
    extra = 2;
  }
  if (extras.size() == extra) return options;
  const auto of_queries = extras.get<Buffer>(extra), of_keys = extras.get<Buffer>(extra + 1);
  const auto is_like = [&](const auto& buffer, int64_t length) {
    return buffer.has_value() && buffer->element_type() == ffi::S32 &&
           static_cast<int64_t>(buffer->element_count()) == shape.batch * length;
  };
  const int64_t ranges = shape.batch * flash_segment_ranges(shape.queries, shape.keys);
  if (!is_like(of_queries, shape.queries) || !is_like(of_keys, shape.keys) ||
      static_cast<int64_t>(workspaces.segment_ranges->element_count()) < 2 * ranges) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the segments do not fit q and k"));
  }
  options.query_segments = data<int32_t>(*of_queries);
  options.key_segments = data<int32_t>(*of_keys);
  options.segment_ranges = data<SegmentRange>(workspaces.segment_ranges);
  return options;
}

// Heads that have their array to themselves.
template <typename T>
HeadRows<T> rows_of_queries(T* array, const FlashShape& shape) {
  return {array, shape.heads * shape.width};
}
template <typename T>
HeadRows<T> rows_of_keys(T* array, const FlashShape& shape) {
  return {array, shape.kv_heads * shape.width};
}

// The parts of a projection: queries, keys and values, in this order.
template <typename T>
struct PackedRows {
  HeadRows<T> q, k, v;

  PackedRows(T* qkv, const FlashShape& shape) {
    const int64_t of_queries = shape.heads * shape.width, of_keys = shape.kv_heads * shape.width;
    const int64_t row = of_queries + 2 * of_keys;
    q = {qkv, row};
    k = {qkv + of_queries, row};
    v = {qkv + of_queries + of_keys, row};
  }
};

ffi::Error FlashAttentionForwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                     ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                     Result out, Result lse, Result segment_ranges, Result turned,
                                     Result scratch) {
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, attributes, extras, {segment_ranges, turned, scratch});
  if (options.has_error()) return options.error();
  return dispatch_floating(q.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(FlashAttention<T>::forward(
        stream, rows_of_queries(data<T>(q), *shape), rows_of_keys(data<T>(k), *shape),
        rows_of_keys(data<T>(v), *shape), *shape, *options, rows_of_queries(data<T>(out), *shape),
        data<float>(lse)));
  });
}

ffi::Error FlashAttentionBackwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer out,
                                      Buffer lse, Buffer dout, ffi::RemainingArgs extras,
                                      ffi::Dictionary attributes, Result dq, Result dk, Result dv,
                                      Result delta, Result segment_ranges, Result turned,
                                      Result scratch) {
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  if (out.element_count() != q.element_count() || dout.element_count() != q.element_count()) {
    return ffi::Error::InvalidArgument("out or dout is not like q");
  }
  const auto options =
      flash_options_of(*shape, attributes, extras, {segment_ranges, turned, scratch});
  if (options.has_error()) return options.error();
  return dispatch_floating(q.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(FlashAttention<T>::backward(
        stream, rows_of_queries(data<T>(q), *shape), rows_of_keys(data<T>(k), *shape),
        rows_of_keys(data<T>(v), *shape), rows_of_queries(data<T>(out), *shape), data<float>(lse),
        rows_of_queries(data<T>(dout), *shape), *shape, *options,
        rows_of_queries(data<T>(dq), *shape), rows_of_keys(data<T>(dk), *shape),
        rows_of_keys(data<T>(dv), *shape), data<float>(delta)));
  });
}

ffi::Error FlashAttentionPackedForwardImpl(cudaStream_t stream, Buffer qkv,
                                           ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                           Result out, Result lse, Result segment_ranges,
                                           Result turned, Result scratch) {
  const auto shape = packed_shape_of(qkv, attributes);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, attributes, extras, {segment_ranges, turned, scratch});
  if (options.has_error()) return options.error();
  return dispatch_floating(qkv.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const PackedRows<const T> rows(data<T>(qkv), *shape);
    return to_ffi_error(FlashAttention<T>::forward(stream, rows.q, rows.k, rows.v, *shape, *options,
                                                   rows_of_queries(data<T>(out), *shape),
                                                   data<float>(lse)));
  });
}

ffi::Error launch_packed_backward(cudaStream_t stream, const Buffer& qkv, const Buffer& out,
                                  const Buffer& lse, const Buffer& dout, const FlashShape& shape,
                                  const FlashOptions& options, Result& dqkv, Result& delta) {
  if (out.element_count() != dout.element_count()) {
    return ffi::Error::InvalidArgument("dout is not like out");
  }
  return dispatch_floating(qkv.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const PackedRows<const T> rows(data<T>(qkv), shape);
    const PackedRows<T> gradients(data<T>(dqkv), shape);
    return to_ffi_error(FlashAttention<T>::backward(
        stream, rows.q, rows.k, rows.v, rows_of_queries(data<T>(out), shape), data<float>(lse),
        rows_of_queries(data<T>(dout), shape), shape, options, gradients.q, gradients.k,
        gradients.v, data<float>(delta)));
  });
}

ffi::Error FlashAttentionPackedBackwardImpl(cudaStream_t stream, Buffer qkv, Buffer out, Buffer lse,
                                            Buffer dout, ffi::RemainingArgs extras,
                                            ffi::Dictionary attributes, Result dqkv, Result delta,
                                            Result segment_ranges, Result turned, Result scratch) {
  const auto shape = packed_shape_of(qkv, attributes);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, attributes, extras, {segment_ranges, turned, scratch});
  if (options.has_error()) return options.error();
  return launch_packed_backward(stream, qkv, out, lse, dout, *shape, *options, dqkv, delta);
}

// Where the gradient of the projection's bias goes. jax.vmap's new leading axis is more groups.
ffi::ErrorOr<FlashBias> bias_of(const Buffer& qkv, const FlashShape& shape, Result& dbias,
                                Result& partial) {
  const int64_t elements = dbias->element_count(), columns = qkv.dimensions().back();
  const int64_t groups = columns == 0 ? 0 : elements / columns;
  if (dbias->element_type() != qkv.element_type() || groups * columns != elements ||
      (groups != 0 && shape.batch % groups != 0)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("dbias does not fit qkv"));
  }
  return FlashBias{dbias->untyped_data(), groups, data<float>(partial),
                   static_cast<int64_t>(partial->element_count())};
}

// Arrays without elements are not known.
ffi::ErrorOr<FlashSums> sums_of(const Buffer& delta, const Buffer& dout_sums,
                                const FlashShape& shape) {
  constexpr int64_t kQueries = 128;
  const int64_t queries = shape.batch * shape.heads * shape.queries;
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  if (count(delta) == 0 && count(dout_sums) == 0) return FlashSums{};
  if (count(delta) != queries || count(dout_sums) != queries / kQueries * shape.width ||
      shape.queries % kQueries != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the sums of dout do not fit qkv"));
  }
  return FlashSums{data<float>(delta), data<float>(dout_sums)};
}

ffi::Error SelfAttentionBackwardImpl(cudaStream_t stream, Buffer qkv, Buffer out, Buffer lse,
                                     Buffer dout, Buffer known_delta, Buffer dout_sums,
                                     ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                     Result dqkv, Result delta, Result segment_ranges,
                                     Result turned, Result scratch, Result dbias, Result partial) {
  const auto shape = packed_shape_of(qkv, attributes);
  if (shape.has_error()) return shape.error();
  auto options = flash_options_of(*shape, attributes, extras, {segment_ranges, turned, scratch});
  if (options.has_error()) return options.error();
  const auto bias = bias_of(qkv, *shape, dbias, partial);
  if (bias.has_error()) return bias.error();
  options->bias = *bias;
  const auto sums = sums_of(known_delta, dout_sums, *shape);
  if (sums.has_error()) return sums.error();
  options->sums = *sums;
  return launch_packed_backward(stream, qkv, out, lse, dout, *shape, *options, dqkv, delta);
}

ffi::Error FlashAttentionFloat8Impl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                    Buffer q_scale, Buffer k_scale, Buffer v_scale,
                                    ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                    Result out, Result segment_ranges, Result turned,
                                    Result scratch) {
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, attributes, extras, {segment_ranges, turned, scratch});
  if (options.has_error()) return options.error();
  using Float8 = __nv_fp8_e4m3;
  return to_ffi_error(FlashAttentionFloat8::forward(
      stream, rows_of_queries(data<Float8>(q), *shape), rows_of_keys(data<Float8>(k), *shape),
      rows_of_keys(data<Float8>(v), *shape), data<float>(q_scale), data<float>(k_scale),
      data<float>(v_scale), *shape, *options, rows_of_queries(data<__nv_bfloat16>(out), *shape)));
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    FlashAttentionForward, FlashAttentionForwardImpl,
    stream_binding()
        .Arg<Buffer>()    // q
        .Arg<Buffer>()    // k
        .Arg<Buffer>()    // v
        .RemainingArgs()  // tables of angles, segments of queries and keys
        .Attrs()          // the options
        .Ret<Buffer>()    // out
        .Ret<Buffer>()    // lse
        .Ret<Buffer>()    // segment_ranges
        .Ret<Buffer>()    // turned
        .Ret<Buffer>(),   // scratch
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    FlashAttentionBackward, FlashAttentionBackwardImpl,
    stream_binding()
        .Arg<Buffer>()    // q
        .Arg<Buffer>()    // k
        .Arg<Buffer>()    // v
        .Arg<Buffer>()    // out
        .Arg<Buffer>()    // lse
        .Arg<Buffer>()    // dout
        .RemainingArgs()  // tables of angles, segments of queries and keys
        .Attrs()          // the options
        .Ret<Buffer>()    // dq
        .Ret<Buffer>()    // dk
        .Ret<Buffer>()    // dv
        .Ret<Buffer>()    // delta
        .Ret<Buffer>()    // segment_ranges
        .Ret<Buffer>()    // turned
        .Ret<Buffer>(),   // scratch
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    FlashAttentionPackedForward, FlashAttentionPackedForwardImpl,
    stream_binding()
        .Arg<Buffer>()    // qkv
        .RemainingArgs()  // tables of angles, segments of queries and keys
        .Attrs()          // the options
        .Ret<Buffer>()    // out
        .Ret<Buffer>()    // lse
        .Ret<Buffer>()    // segment_ranges
        .Ret<Buffer>()    // turned
        .Ret<Buffer>(),   // scratch
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    FlashAttentionPackedBackward, FlashAttentionPackedBackwardImpl,
    stream_binding()
        .Arg<Buffer>()    // qkv
        .Arg<Buffer>()    // out
        .Arg<Buffer>()    // lse
        .Arg<Buffer>()    // dout
        .RemainingArgs()  // tables of angles, segments of queries and keys
        .Attrs()          // the options
        .Ret<Buffer>()    // dqkv
        .Ret<Buffer>()    // delta
        .Ret<Buffer>()    // segment_ranges
        .Ret<Buffer>()    // turned
        .Ret<Buffer>(),   // scratch
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SelfAttentionBackward, SelfAttentionBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()    // qkv
                                  .Arg<Buffer>()    // out
                                  .Arg<Buffer>()    // lse
                                  .Arg<Buffer>()    // dout
                                  .Arg<Buffer>()    // known_delta
                                  .Arg<Buffer>()    // dout_sums
                                  .RemainingArgs()  // segments of queries and keys
                                  .Attrs()          // the options
                                  .Ret<Buffer>()    // dqkv
                                  .Ret<Buffer>()    // delta
                                  .Ret<Buffer>()    // segment_ranges
                                  .Ret<Buffer>()    // turned
                                  .Ret<Buffer>()    // scratch
                                  .Ret<Buffer>()    // dbias
                                  .Ret<Buffer>(),   // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    FlashAttentionFloat8, FlashAttentionFloat8Impl,
    stream_binding()
        .Arg<Buffer>()    // q
        .Arg<Buffer>()    // k
        .Arg<Buffer>()    // v
        .Arg<Buffer>()    // q_scale
        .Arg<Buffer>()    // k_scale
        .Arg<Buffer>()    // v_scale
        .RemainingArgs()  // tables of angles, segments of queries and keys
        .Attrs()          // the options
        .Ret<Buffer>()    // out
        .Ret<Buffer>()    // segment_ranges
        .Ret<Buffer>()    // turned
        .Ret<Buffer>(),   // scratch
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxForward, SoftmaxForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()         // x
                                  .Attr<float>("scale")  //
                                  .Attr<bool>("causal")  //
                                  .Ret<Buffer>(),        // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxBackward, SoftmaxBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()         // out
                                  .Arg<Buffer>()         // dout
                                  .Attr<float>("scale")  //
                                  .Attr<bool>("causal")  //
                                  .Ret<Buffer>(),        // dx
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RepeatKvForward, RepeatKvForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()            // x
                                  .Attr<int64_t>("groups")  //
                                  .Ret<Buffer>(),           // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RepeatKvBackward, RepeatKvBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()            // dout
                                  .Attr<int64_t>("groups")  //
                                  .Ret<Buffer>(),           // dx
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
