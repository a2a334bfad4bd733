// FFI handlers of the attention kernels: check the buffers, switch on their dtypes, launch.
#include "common/ffi.h"

#include "attention/flash_attention.h"
#include "attention/repeat_kv.h"
#include "attention/softmax.h"
#include "common/launch.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Rows of scores, `length` of them to a mask. jax.vmap's new leading axis is more rows.
struct Rows {
  int64_t rows, width, length;
};

ffi::ErrorOr<Rows> rows_of(const Buffer& x, const char* name, bool causal) {
  const auto dimensions = x.dimensions();
  const size_t axes = dimensions.size();
  if (axes < (causal ? 2 : 1)) return ffi::Unexpected(invalid(name, "has too few axes"));
  const int64_t width = dimensions[axes - 1];
  if (count(x) == 0) return Rows{0, width, 1};
  // Without a mask every row sees all, as the last of its queries does.
  const int64_t length = causal ? dimensions[axes - 2] : 1;
  return Rows{count(x) / width, width, length};
}

ffi::Error SoftmaxForwardImpl(cudaStream_t stream, Buffer x, float scale, bool causal, Result out) {
  const ffi::ErrorOr<Rows> rows = rows_of(x, "x", causal);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), count(x)}}, [&] {
      return Softmax<T>::forward(stream, data<T>(x), scale, data<T>(out), rows->rows, rows->width,
                                 rows->length);
    });
  });
}

ffi::Error SoftmaxBackwardImpl(cudaStream_t stream, Buffer out, Buffer dout, float scale,
                               bool causal, Result dx) {
  const ffi::ErrorOr<Rows> rows = rows_of(out, "out", causal);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(out, "out", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {{"dout", dout, dtype_of<T>(), count(out)}, {"dx", *dx, dtype_of<T>(), count(out)}}, [&] {
          return Softmax<T>::backward(stream, data<T>(out), data<T>(dout), scale, data<T>(dx),
                                      rows->rows, rows->width, rows->length);
        });
  });
}

// Heads of `width` elements.
struct Heads {
  int64_t heads, width;
};

ffi::ErrorOr<Heads> heads_of(const Buffer& one, const char* name, int64_t groups) {
  if (one.dimensions().size() == 0) return ffi::Unexpected(invalid(name, "is a scalar"));
  if (groups < 1) return ffi::Unexpected(invalid("groups", "is below 1"));
  if (count(one) == 0) return Heads{0, 0};
  const int64_t width = one.dimensions().back();
  return Heads{count(one) / width, width};
}

ffi::Error RepeatKvForwardImpl(cudaStream_t stream, Buffer x, int64_t groups, Result out) {
  const ffi::ErrorOr<Heads> heads = heads_of(x, "x", groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), count(x) * groups}}, [&] {
      return RepeatKv<T>::forward(stream, data<T>(x), data<T>(out), heads->heads, heads->width,
                                  groups);
    });
  });
}

ffi::Error RepeatKvBackwardImpl(cudaStream_t stream, Buffer dout, int64_t groups, Result dx) {
  const ffi::ErrorOr<Heads> heads = heads_of(*dx, "dx", groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(dout, "dout", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"dout", dout, dtype_of<T>(), count(*dx) * groups},
                             {"dx", *dx, dtype_of<T>(), count(*dx)}},
                            [&] {
                              return RepeatKv<T>::backward(stream, data<T>(dout), data<T>(dx),
                                                           heads->heads, heads->width, groups);
                            });
  });
}

int64_t query_elements(const FlashShape& s) { return s.batch * s.queries * s.heads * s.width; }
int64_t key_elements(const FlashShape& s) { return s.batch * s.keys * s.kv_heads * s.width; }
// As many as lse and delta have.
int64_t query_rows(const FlashShape& s) { return s.batch * s.heads * s.queries; }

// The sizes of q (..., T, N, H) and k (..., S, K, H). jax.vmap's new leading axis is more
// sequences.
ffi::ErrorOr<FlashShape> flash_shape_of(const Buffer& q, const Buffer& k, const Buffer& v) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  const size_t axes = of_q.size();
  if (axes < 3) return ffi::Unexpected(invalid("q", "has too few axes"));
  if (of_k.size() != axes) return ffi::Unexpected(invalid("k", "has not as many axes as q"));
  FlashShape shape{
      1, of_q[axes - 3], of_k[axes - 3], of_q[axes - 2], of_k[axes - 2], of_q[axes - 1]};
  for (size_t i = 0; i + 3 < axes; ++i) shape.batch *= of_q[i];
  if (shape.kv_heads == 0 || shape.heads % shape.kv_heads != 0) {
    return ffi::Unexpected(invalid("k", "has heads whose number does not divide that of q"));
  }
  const ffi::Error error = check_buffers({{"k", k, q.element_type(), key_elements(shape)},
                                          {"v", v, q.element_type(), key_elements(shape)}});
  if (error.failure()) return ffi::Unexpected(error);
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
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) {
    return ffi::Unexpected(invalid("kv_heads", "does not divide heads"));
  }
  if (axes.size() < 2 || axes.back() % (heads + 2 * kv_heads) != 0) {
    return ffi::Unexpected(invalid("qkv", "does not fit its heads"));
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

// Behind the arrays of a call come, where `rope` says so, the cosines and sines of the positions.
ffi::ErrorOr<FlashRope> rope_of(const FlashShape& shape, ffi::RemainingArgs extras,
                                bool interleaved, Result& turned) {
  const auto cos = extras.get<Buffer>(0), sin = extras.get<Buffer>(1);
  if (!cos || !sin) return ffi::Unexpected(invalid("cos", "or sin is missing"));
  if (cos->dimensions().size() < 2) return ffi::Unexpected(invalid("cos", "has too few axes"));
  const int64_t elements = count(*cos), pairs = cos->dimensions().back();
  const ffi::Error error =
      check_buffers({{"cos", *cos, ffi::F32, elements}, {"sin", *sin, ffi::F32, elements}});
  if (error.failure()) return ffi::Unexpected(error);
  if (elements == 0) return FlashRope{};  // there is nothing to turn
  const int64_t table = shape.queries * pairs;
  if (shape.queries != shape.keys || table == 0 || elements % table != 0 ||
      shape.batch % (elements / table) != 0 || 2 * pairs > shape.width) {
    return ffi::Unexpected(invalid("cos", "does not fit q"));
  }
  return FlashRope{data<float>(*cos), data<float>(*sin),     elements / table, pairs,
                   interleaved,       turned->untyped_data()};
}

// The options of a call whose arrays have this dtype. Behind its tables come no segments or two
// arrays of them, the queries' and the keys'. With `hopper` there is a scratch, which has
// `scratch_size` floats.
ffi::ErrorOr<FlashOptions> flash_options_of(const FlashShape& shape, ffi::DataType dtype,
                                            ffi::Dictionary attributes, ffi::RemainingArgs extras,
                                            FlashWorkspaces workspaces, int64_t scratch_size) {
  const auto scale = attributes.get<float>("scale"), softcap = attributes.get<float>("softcap");
  const auto causal = attributes.get<bool>("causal"), rope = attributes.get<bool>("rope");
  const auto interleaved = attributes.get<bool>("interleaved");
  const auto hopper = attributes.get<bool>("hopper");
  const auto window = attributes.get<int64_t>("window");
  if (!scale || !softcap || !causal || !rope || !interleaved || !hopper || !window) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("an attribute of attention is missing"));
  }
  if (*hopper && shape.width != 64 && shape.width != 128) {
    return ffi::Unexpected(invalid("hopper", "is for heads 64 or 128 wide"));
  }
  FlashOptions options{};
  options.scale = *scale;
  options.causal = *causal;
  options.window = *window;
  options.softcap = *softcap;
  const size_t tables = *rope ? 2 : 0;
  const bool segments = extras.size() == tables + 2;
  if (extras.size() != tables && !segments) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("there are too few or too many arrays"));
  }
  const int64_t ranges = shape.batch * flash_segment_ranges(shape.queries, shape.keys);
  const int64_t turned = shape.batch * shape.queries * (shape.heads + shape.kv_heads) * shape.width;
  const ffi::Error error = check_buffers(
      {{"segment_ranges", *workspaces.segment_ranges, ffi::S32, segments ? 2 * ranges : 0},
       {"turned", *workspaces.turned, dtype, *rope ? turned : 0},
       {"scratch", *workspaces.scratch, ffi::F32, *hopper ? scratch_size : 0}});
  if (error.failure()) return ffi::Unexpected(error);
  options.scratch = {workspaces.scratch->untyped_data(),
                     static_cast<int64_t>(workspaces.scratch->size_bytes())};
  if (*rope) {
    const auto found = rope_of(shape, extras, *interleaved, workspaces.turned);
    if (found.has_error()) return ffi::Unexpected(found.error());
    options.rope = *found;
  }
  if (!segments) return options;
  const auto of_queries = extras.get<Buffer>(tables), of_keys = extras.get<Buffer>(tables + 1);
  if (!of_queries || !of_keys) return ffi::Unexpected(invalid("the segments", "are no arrays"));
  const ffi::Error of_segments = check_buffers(
      {{"the segments of the queries", *of_queries, ffi::S32, shape.batch * shape.queries},
       {"the segments of the keys", *of_keys, ffi::S32, shape.batch * shape.keys}});
  if (of_segments.failure()) return ffi::Unexpected(of_segments);
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
      flash_options_of(*shape, q.element_type(), attributes, extras,
                       {segment_ranges, turned, scratch}, flash_forward_scratch(*shape));
  if (options.has_error()) return options.error();
  return dispatch_floating(q, "q", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), query_elements(*shape)},
                             {"lse", *lse, ffi::F32, query_rows(*shape)}},
                            [&] {
                              return FlashAttention<T>::forward(
                                  stream, rows_of_queries(data<T>(q), *shape),
                                  rows_of_keys(data<T>(k), *shape),
                                  rows_of_keys(data<T>(v), *shape), *shape, *options,
                                  rows_of_queries(data<T>(out), *shape), data<float>(lse));
                            });
  });
}

ffi::Error FlashAttentionBackwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer out,
                                      Buffer lse, Buffer dout, ffi::RemainingArgs extras,
                                      ffi::Dictionary attributes, Result dq, Result dk, Result dv,
                                      Result delta, Result segment_ranges, Result turned,
                                      Result scratch) {
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, q.element_type(), attributes, extras,
                       {segment_ranges, turned, scratch}, flash_backward_scratch(*shape));
  if (options.has_error()) return options.error();
  return dispatch_floating(q, "q", [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t of_queries = query_elements(*shape), of_keys = key_elements(*shape);
    return check_and_launch(
        {{"out", out, dtype_of<T>(), of_queries},
         {"lse", lse, ffi::F32, query_rows(*shape)},
         {"dout", dout, dtype_of<T>(), of_queries},
         {"dq", *dq, dtype_of<T>(), of_queries},
         {"dk", *dk, dtype_of<T>(), of_keys},
         {"dv", *dv, dtype_of<T>(), of_keys},
         {"delta", *delta, ffi::F32, query_rows(*shape)}},
        [&] {
          return FlashAttention<T>::backward(
              stream, rows_of_queries(data<T>(q), *shape), rows_of_keys(data<T>(k), *shape),
              rows_of_keys(data<T>(v), *shape), rows_of_queries(data<T>(out), *shape),
              data<float>(lse), rows_of_queries(data<T>(dout), *shape), *shape, *options,
              rows_of_queries(data<T>(dq), *shape), rows_of_keys(data<T>(dk), *shape),
              rows_of_keys(data<T>(dv), *shape), data<float>(delta));
        });
  });
}

ffi::Error FlashAttentionPackedForwardImpl(cudaStream_t stream, Buffer qkv,
                                           ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                           Result out, Result lse, Result segment_ranges,
                                           Result turned, Result scratch) {
  const auto shape = packed_shape_of(qkv, attributes);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, qkv.element_type(), attributes, extras,
                       {segment_ranges, turned, scratch}, flash_forward_scratch(*shape));
  if (options.has_error()) return options.error();
  return dispatch_floating(qkv, "qkv", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), query_elements(*shape)},
                             {"lse", *lse, ffi::F32, query_rows(*shape)}},
                            [&] {
                              const PackedRows<const T> rows(data<T>(qkv), *shape);
                              return FlashAttention<T>::forward(
                                  stream, rows.q, rows.k, rows.v, *shape, *options,
                                  rows_of_queries(data<T>(out), *shape), data<float>(lse));
                            });
  });
}

ffi::Error launch_packed_backward(cudaStream_t stream, const Buffer& qkv, const Buffer& out,
                                  const Buffer& lse, const Buffer& dout, const FlashShape& shape,
                                  const FlashOptions& options, Result& dqkv, Result& delta) {
  return dispatch_floating(qkv, "qkv", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", out, dtype_of<T>(), query_elements(shape)},
                             {"lse", lse, ffi::F32, query_rows(shape)},
                             {"dout", dout, dtype_of<T>(), query_elements(shape)},
                             {"dqkv", *dqkv, dtype_of<T>(), count(qkv)},
                             {"delta", *delta, ffi::F32, query_rows(shape)}},
                            [&] {
                              const PackedRows<const T> rows(data<T>(qkv), shape);
                              const PackedRows<T> gradients(data<T>(dqkv), shape);
                              return FlashAttention<T>::backward(
                                  stream, rows.q, rows.k, rows.v,
                                  rows_of_queries(data<T>(out), shape), data<float>(lse),
                                  rows_of_queries(data<T>(dout), shape), shape, options,
                                  gradients.q, gradients.k, gradients.v, data<float>(delta));
                            });
  });
}

ffi::Error FlashAttentionPackedBackwardImpl(cudaStream_t stream, Buffer qkv, Buffer out, Buffer lse,
                                            Buffer dout, ffi::RemainingArgs extras,
                                            ffi::Dictionary attributes, Result dqkv, Result delta,
                                            Result segment_ranges, Result turned, Result scratch) {
  const auto shape = packed_shape_of(qkv, attributes);
  if (shape.has_error()) return shape.error();
  const auto options =
      flash_options_of(*shape, qkv.element_type(), attributes, extras,
                       {segment_ranges, turned, scratch}, flash_backward_scratch(*shape));
  if (options.has_error()) return options.error();
  return launch_packed_backward(stream, qkv, out, lse, dout, *shape, *options, dqkv, delta);
}

// Where the gradient of the projection's bias goes. jax.vmap's new leading axis is more groups.
ffi::ErrorOr<FlashBias> bias_of(const Buffer& qkv, const FlashShape& shape, bool hopper,
                                Result& dbias, Result& partial) {
  const int64_t columns = qkv.dimensions().back();
  const int64_t groups = columns == 0 ? 0 : count(*dbias) / columns;
  if (groups != 0 && shape.batch % groups != 0) {
    return ffi::Unexpected(invalid("dbias", "does not fit qkv"));
  }
  const int64_t needed =
      groups == 0 ? 0 : groups * flash_bias_partial(shape, shape.batch / groups, hopper);
  const ffi::Error error = check_buffers({{"dbias", *dbias, qkv.element_type(), groups * columns},
                                          {"partial", *partial, ffi::F32, needed}});
  if (error.failure()) return ffi::Unexpected(error);
  return FlashBias{dbias->untyped_data(), groups, data<float>(partial), count(*partial)};
}

// Arrays without elements are not known.
ffi::ErrorOr<FlashSums> sums_of(const Buffer& delta, const Buffer& dout_sums,
                                const FlashShape& shape) {
  constexpr int64_t kQueries = 128;
  const bool is_known = count(delta) != 0 || count(dout_sums) != 0;
  if (is_known && shape.queries % kQueries != 0) {
    return ffi::Unexpected(
        invalid("dout_sums", "are of 128 queries each, of which qkv has a part"));
  }
  const int64_t queries = is_known ? query_rows(shape) : 0;
  const ffi::Error error =
      check_buffers({{"known_delta", delta, ffi::F32, queries},
                     {"dout_sums", dout_sums, ffi::F32, queries / kQueries * shape.width}});
  if (error.failure()) return ffi::Unexpected(error);
  if (!is_known) return FlashSums{};
  return FlashSums{data<float>(delta), data<float>(dout_sums)};
}

ffi::Error SelfAttentionBackwardImpl(cudaStream_t stream, Buffer qkv, Buffer out, Buffer lse,
                                     Buffer dout, Buffer known_delta, Buffer dout_sums,
                                     ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                     Result dqkv, Result delta, Result segment_ranges,
                                     Result turned, Result scratch, Result dbias, Result partial) {
  const auto shape = packed_shape_of(qkv, attributes);
  if (shape.has_error()) return shape.error();
  auto options =
      flash_options_of(*shape, qkv.element_type(), attributes, extras,
                       {segment_ranges, turned, scratch}, flash_backward_scratch(*shape));
  if (options.has_error()) return options.error();
  const auto bias = bias_of(qkv, *shape, *attributes.get<bool>("hopper"), dbias, partial);
  if (bias.has_error()) return bias.error();
  options->bias = *bias;
  const auto sums = sums_of(known_delta, dout_sums, *shape);
  if (sums.has_error()) return sums.error();
  options->sums = *sums;
  return launch_packed_backward(stream, qkv, out, lse, dout, *shape, *options, dqkv, delta);
}

// One set of scales for all sequences; of jax.vmap's new leading axis, one for each of its calls.
cudaError_t run_float8(cudaStream_t stream, const Buffer& q, const Buffer& k, const Buffer& v,
                       const Buffer& q_scale, const Buffer& k_scale, const Buffer& v_scale,
                       const FlashShape& shape, const FlashOptions& options, int64_t calls,
                       Result& out) {
  using Float8 = __nv_fp8_e4m3;
  FlashShape each = shape;
  each.batch /= calls;
  for (int64_t call = 0; call < calls; ++call) {
    FlashOptions of_call = options;
    if (options.query_segments != nullptr) {
      of_call.query_segments += call * each.batch * each.queries;
      of_call.key_segments += call * each.batch * each.keys;
      of_call.segment_ranges += call * each.batch * flash_segment_ranges(each.queries, each.keys);
    }
    const int64_t of_queries = call * query_elements(each), of_keys = call * key_elements(each);
    JAXLLM_RETURN_IF_ERROR(FlashAttentionFloat8::forward(
        stream, rows_of_queries(data<Float8>(q) + of_queries, each),
        rows_of_keys(data<Float8>(k) + of_keys, each),
        rows_of_keys(data<Float8>(v) + of_keys, each), data<float>(q_scale) + call * each.heads,
        data<float>(k_scale) + call * each.kv_heads, data<float>(v_scale) + call * each.kv_heads,
        each, of_call, rows_of_queries(data<__nv_bfloat16>(out) + of_queries, each)));
  }
  return cudaSuccess;
}

ffi::Error FlashAttentionFloat8Impl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                    Buffer q_scale, Buffer k_scale, Buffer v_scale,
                                    ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                    Result out, Result segment_ranges, Result turned,
                                    Result scratch) {
  if (q.element_type() != ffi::F8E4M3FN) return invalid("q", "has not the dtype float8_e4m3fn");
  const auto shape = flash_shape_of(q, k, v);
  if (shape.has_error()) return shape.error();
  const auto options = flash_options_of(*shape, q.element_type(), attributes, extras,
                                        {segment_ranges, turned, scratch}, /*scratch_size=*/0);
  if (options.has_error()) return options.error();
  if (options->rope.cos != nullptr) return invalid("rope", "is not for float8");
  const int64_t calls = shape->heads == 0 ? 1 : count(q_scale) / shape->heads;
  if (calls == 0 || shape->batch % calls != 0) return invalid("q_scale", "does not fit q");
  return check_and_launch({{"q_scale", q_scale, ffi::F32, calls * shape->heads},
                           {"k_scale", k_scale, ffi::F32, calls * shape->kv_heads},
                           {"v_scale", v_scale, ffi::F32, calls * shape->kv_heads},
                           {"out", *out, ffi::BF16, query_elements(*shape)}},
                          [&] {
                            return run_float8(stream, q, k, v, q_scale, k_scale, v_scale, *shape,
                                              *options, calls, out);
                          });
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
