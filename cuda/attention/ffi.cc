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

// The options; `segments` are none or two arrays, the queries' and the keys'.
ffi::ErrorOr<FlashOptions> flash_options_of(const FlashShape& shape, ffi::RemainingArgs segments,
                                            Result& segment_ranges, float scale, bool causal,
                                            int64_t window, float softcap) {
  FlashOptions options{scale, causal, window, softcap, nullptr, nullptr, nullptr};
  if (segments.size() == 0) return options;
  const auto of_queries = segments.get<Buffer>(0), of_keys = segments.get<Buffer>(1);
  if (of_queries.has_error()) return ffi::Unexpected(of_queries.error());
  if (of_keys.has_error()) return ffi::Unexpected(of_keys.error());
  const auto is_like = [&](const Buffer& buffer, int64_t length) {
    return buffer.element_type() == ffi::S32 &&
           static_cast<int64_t>(buffer.element_count()) == shape.batch * length;
  };
  const int64_t ranges = shape.batch * flash_segment_ranges(shape.queries, shape.keys);
  if (!is_like(*of_queries, shape.queries) || !is_like(*of_keys, shape.keys) ||
      static_cast<int64_t>(segment_ranges->element_count()) < 2 * ranges) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the segments do not fit q and k"));
  }
  options.query_segments = data<int32_t>(*of_queries);
  options.key_segments = data<int32_t>(*of_keys);
  options.segment_ranges = data<SegmentRange>(segment_ranges);
  return options;
}

template <typename T>
HeadRows<const T> rows_of_queries(const Buffer& array, const FlashShape& shape) {
  return {data<T>(array), shape.heads * shape.width};
}
template <typename T>
HeadRows<T> rows_of_queries(Result& array, const FlashShape& shape) {
  return {data<T>(array), shape.heads * shape.width};
}
template <typename T>
HeadRows<const T> rows_of_keys(const Buffer& array, const FlashShape& shape) {
  return {data<T>(array), shape.kv_heads * shape.width};
}
template <typename T>
HeadRows<T> rows_of_keys(Result& array, const FlashShape& shape) {
  return {data<T>(array), shape.kv_heads * shape.width};
}

ffi::Error FlashAttentionForwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                     ffi::RemainingArgs segments, float scale, bool causal,
                                     int64_t window, float softcap, Result out, Result lse,
                                     Result segment_ranges) {
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, segments, segment_ranges, scale, causal, window, softcap);
  if (options.has_error()) return options.error();
  return dispatch_floating(q.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        FlashAttention<T>::forward(stream, rows_of_queries<T>(q, *shape),
                                   rows_of_keys<T>(k, *shape), rows_of_keys<T>(v, *shape), *shape,
                                   *options, rows_of_queries<T>(out, *shape), data<float>(lse)));
  });
}

ffi::Error FlashAttentionBackwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer out,
                                      Buffer lse, Buffer dout, ffi::RemainingArgs segments,
                                      float scale, bool causal, int64_t window, float softcap,
                                      Result dq, Result dk, Result dv, Result delta,
                                      Result segment_ranges) {
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  if (out.element_count() != q.element_count() || dout.element_count() != q.element_count()) {
    return ffi::Error::InvalidArgument("out or dout is not like q");
  }
  const auto options =
      flash_options_of(*shape, segments, segment_ranges, scale, causal, window, softcap);
  if (options.has_error()) return options.error();
  return dispatch_floating(q.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(FlashAttention<T>::backward(
        stream, rows_of_queries<T>(q, *shape), rows_of_keys<T>(k, *shape),
        rows_of_keys<T>(v, *shape), rows_of_queries<T>(out, *shape), data<float>(lse),
        rows_of_queries<T>(dout, *shape), *shape, *options, rows_of_queries<T>(dq, *shape),
        rows_of_keys<T>(dk, *shape), rows_of_keys<T>(dv, *shape), data<float>(delta)));
  });
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(FlashAttentionForward, FlashAttentionForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()            // q
                                  .Arg<Buffer>()            // k
                                  .Arg<Buffer>()            // v
                                  .RemainingArgs()          // segments of queries and keys
                                  .Attr<float>("scale")     //
                                  .Attr<bool>("causal")     //
                                  .Attr<int64_t>("window")  //
                                  .Attr<float>("softcap")   //
                                  .Ret<Buffer>()            // out
                                  .Ret<Buffer>()            // lse
                                  .Ret<Buffer>(),           // segment_ranges
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(FlashAttentionBackward, FlashAttentionBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()            // q
                                  .Arg<Buffer>()            // k
                                  .Arg<Buffer>()            // v
                                  .Arg<Buffer>()            // out
                                  .Arg<Buffer>()            // lse
                                  .Arg<Buffer>()            // dout
                                  .RemainingArgs()          // segments of queries and keys
                                  .Attr<float>("scale")     //
                                  .Attr<bool>("causal")     //
                                  .Attr<int64_t>("window")  //
                                  .Attr<float>("softcap")   //
                                  .Ret<Buffer>()            // dq
                                  .Ret<Buffer>()            // dk
                                  .Ret<Buffer>()            // dv
                                  .Ret<Buffer>()            // delta
                                  .Ret<Buffer>(),           // segment_ranges
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
