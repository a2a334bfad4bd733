// FFI handlers of flash attention: check the buffers, switch on their dtypes, launch.
#include "attention/flash_attention.h"
#include "common/ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

int64_t query_elements(const FlashShape& s) { return s.batch * s.queries * s.heads * s.width; }
int64_t key_elements(const FlashShape& s) { return s.batch * s.keys * s.kv_heads * s.width; }
int64_t value_elements(const FlashShape& s) {
  return s.batch * s.keys * s.kv_heads * s.value_width;
}
int64_t out_elements(const FlashShape& s) { return s.batch * s.queries * s.heads * s.value_width; }
// The elements of lse, and of delta.
int64_t query_rows(const FlashShape& s) { return s.batch * s.heads * s.queries; }

// The sizes of q (..., T, N, H), k (..., S, K, H) and v (..., S, K, Hv). A leading axis of jax.vmap
// adds sequences.
ffi::ErrorOr<FlashShape> flash_shape_of(const Buffer& q, const Buffer& k, const Buffer& v) {
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_v = v.dimensions();
  const size_t axes = of_q.size();
  if (axes < 3) return ffi::Unexpected(invalid("q", "has too few axes"));
  if (of_k.size() != axes) return ffi::Unexpected(invalid("k", "has not as many axes as q"));
  if (of_v.size() != axes) return ffi::Unexpected(invalid("v", "has not as many axes as q"));
  FlashShape shape{1,
                   of_q[axes - 3],
                   of_k[axes - 3],
                   of_q[axes - 2],
                   of_k[axes - 2],
                   of_q[axes - 1],
                   of_v[axes - 1]};
  for (size_t i = 0; i + 3 < axes; ++i) shape.batch *= of_q[i];
  if (shape.kv_heads == 0 || shape.heads % shape.kv_heads != 0) {
    return ffi::Unexpected(invalid("k", "has heads whose number does not divide that of q"));
  }
  const ffi::Error error = check_buffers({{"k", k, q.element_type(), key_elements(shape)},
                                          {"v", v, q.element_type(), value_elements(shape)}});
  if (error.failure()) return ffi::Unexpected(error);
  return shape;
}

// The sizes of a packed projection (..., T, (N + 2K) H) of queries, keys and values.
ffi::ErrorOr<FlashShape> packed_shape_of(const Buffer& qkv, ffi::Dictionary attributes) {
  const auto axes = qkv.dimensions();
  const auto heads = attributes.get<int64_t>("heads");
  const auto kv_heads = attributes.get<int64_t>("kv_heads");
  if (!heads) return ffi::Unexpected(heads.error());
  if (!kv_heads) return ffi::Unexpected(kv_heads.error());
  if (*heads < 1 || *kv_heads < 1 || *heads % *kv_heads != 0) {
    return ffi::Unexpected(invalid("kv_heads", "does not divide heads"));
  }
  const int64_t all_heads = *heads + 2 * *kv_heads;
  if (axes.size() < 2 || axes.back() % all_heads != 0) {
    return ffi::Unexpected(invalid("qkv", "does not fit its heads"));
  }
  const int64_t length = axes[axes.size() - 2];
  FlashShape shape{1, length, length, *heads, *kv_heads, axes.back() / all_heads};
  for (size_t i = 0; i + 2 < axes.size(); ++i) shape.batch *= axes[i];
  return shape;
}

// Reads the tables of cosines and sines, the first two of `extras`.
ffi::ErrorOr<FlashRope> rope_of(const FlashShape& shape, ffi::RemainingArgs extras,
                                bool interleaved) {
  const auto cos = extras.get<Buffer>(0), sin = extras.get<Buffer>(1);
  if (!cos || !sin) return ffi::Unexpected(invalid("cos", "or sin is missing"));
  if (cos->dimensions().size() < 2) return ffi::Unexpected(invalid("cos", "has too few axes"));
  const int64_t elements = count(*cos), pairs = cos->dimensions().back();
  const ffi::Error error =
      check_buffers({{"cos", *cos, ffi::F32, elements}, {"sin", *sin, ffi::F32, elements}});
  if (error.failure()) return ffi::Unexpected(error);
  if (elements == 0) return FlashRope{};
  const int64_t table = shape.queries * pairs;
  if (shape.queries != shape.keys || table == 0 || elements % table != 0 ||
      shape.batch % (elements / table) != 0 || 2 * pairs > shape.width) {
    return ffi::Unexpected(invalid("cos", "does not fit q"));
  }
  return FlashRope{data<float>(*cos), data<float>(*sin), elements / table, pairs, interleaved};
}

// The workspaces of either direction.
struct FlashWorkspaces {
  Result &segment_ranges, &arranged, &scratch;
};

// q, k and v, or their gradients: three arrays, or a packed projection three times.
struct Qkv {
  Buffer q, k, v;
  bool is_packed = false;

  static Qkv packed(const Buffer& qkv) { return {qkv, qkv, qkv, true}; }
};

// What both directions take of a call.
struct FlashCall {
  Qkv qkv;
  FlashShape shape;
  FlashOptions options;
  const float* dlse = nullptr;  // of the backward
};

// What differs between the directions: the floats of the scratch, and whether there are gradients.
struct FlashDirection {
  int64_t (*scratch_size)(const FlashShape&);
  bool has_gradients;
};
constexpr FlashDirection kForward{flash_forward_scratch, false};
constexpr FlashDirection kBackward{flash_backward_scratch, true};

// One set of sinks serves all sequences; a leading axis of jax.vmap adds sets.
ffi::ErrorOr<FlashSinks> sinks_of(const FlashShape& shape, const Buffer& sinks) {
  const int64_t groups = shape.heads == 0 ? 0 : count(sinks) / shape.heads;
  const ffi::Error error = check_buffers({{"sinks", sinks, ffi::F32, groups * shape.heads}});
  if (error.failure()) return ffi::Unexpected(error);
  if (groups == 0 || shape.batch % groups != 0) {
    return ffi::Unexpected(invalid("sinks", "do not fit q"));
  }
  return FlashSinks{data<float>(sinks), groups};
}

// Reads the options of a call. `extras` are the tables of cosines and sines, if the attribute
// `rope` is true, then the segments of the queries and keys, if there are segments, then the
// sinks of a forward, if there is an attribute `sinks`, or the gradient of lse of a backward, if
// there is an attribute `dlse`. With the attribute `hopper` the scratch has
// direction.scratch_size(shape) floats.
ffi::ErrorOr<FlashCall> flash_call_of(const Qkv& qkv, ffi::RemainingArgs extras,
                                      ffi::Dictionary attributes, FlashWorkspaces workspaces,
                                      FlashDirection direction) {
  const auto found_shape =
      qkv.is_packed ? packed_shape_of(qkv.q, attributes) : flash_shape_of(qkv.q, qkv.k, qkv.v);
  if (found_shape.has_error()) return ffi::Unexpected(found_shape.error());
  FlashCall call{qkv, *found_shape, {}, nullptr};
  const FlashShape& shape = call.shape;
  FlashOptions& options = call.options;
  const auto scale = attributes.get<float>("scale"), softcap = attributes.get<float>("softcap");
  const auto left = attributes.get<int64_t>("left"), right = attributes.get<int64_t>("right");
  const auto rope = attributes.get<bool>("rope");
  const auto interleaved = attributes.get<bool>("interleaved");
  const auto hopper = attributes.get<bool>("hopper"), by_parts = attributes.get<bool>("by_parts");
  if (!scale || !softcap || !left || !right || !rope || !interleaved || !hopper || !by_parts) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("an attribute of attention is missing"));
  }
  if (*hopper && !flash_has_hopper_widths(shape)) {
    return ffi::Unexpected(invalid("hopper",
                                   "is for heads up to 256 wide, in multiples of 8, or of 192 with "
                                   "values of 128"));
  }
  options.scale = *scale;
  options.left = *left;
  options.right = *right;
  if (*by_parts && !qkv.is_packed) {
    return ffi::Unexpected(invalid("by_parts", "is for packed projections"));
  }
  options.softcap = *softcap;
  const size_t tables = *rope ? 2 : 0;
  const bool has_last = attributes.contains(direction.has_gradients ? "dlse" : "sinks");
  const bool segments = extras.size() == tables + 2 + has_last;
  if (extras.size() != tables + has_last && !segments) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("there are too few or too many arrays"));
  }
  const int64_t ranges = shape.batch * flash_segment_ranges(shape.queries, shape.keys);
  const int64_t of_gradients = *by_parts && direction.has_gradients ? shape.heads : 0;
  const int64_t heads = shape.heads + shape.kv_heads + of_gradients;
  const int64_t arranged = shape.batch * shape.queries * heads * shape.width;
  const ffi::Error error = check_buffers(
      {{"segment_ranges", *workspaces.segment_ranges, ffi::S32, segments ? 2 * ranges : 0},
       {"arranged", *workspaces.arranged, qkv.q.element_type(), *rope || *by_parts ? arranged : 0},
       {"scratch", *workspaces.scratch, ffi::F32, *hopper ? direction.scratch_size(shape) : 0}});
  if (error.failure()) return ffi::Unexpected(error);
  options.scratch = {workspaces.scratch->untyped_data(),
                     static_cast<int64_t>(workspaces.scratch->size_bytes())};
  options.by_parts = *by_parts;
  options.arranged = workspaces.arranged->untyped_data();
  if (*rope) {
    const auto found = rope_of(shape, extras, *interleaved);
    if (found.has_error()) return ffi::Unexpected(found.error());
    options.rope = *found;
  }
  if (has_last) {
    const auto last = extras.get<Buffer>(extras.size() - 1);
    if (!last) return ffi::Unexpected(invalid("the last array", "is none"));
    if (direction.has_gradients) {
      const ffi::Error of_dlse = check_buffers({{"dlse", *last, ffi::F32, query_rows(shape)}});
      if (of_dlse.failure()) return ffi::Unexpected(of_dlse);
      call.dlse = data<float>(*last);
    } else {
      const auto sinks = sinks_of(shape, *last);
      if (sinks.has_error()) return ffi::Unexpected(sinks.error());
      options.sinks = *sinks;
    }
  }
  if (!segments) return call;
  const auto of_queries = extras.get<Buffer>(tables), of_keys = extras.get<Buffer>(tables + 1);
  if (!of_queries || !of_keys) return ffi::Unexpected(invalid("the segments", "are no arrays"));
  const ffi::Error of_segments = check_buffers(
      {{"the segments of the queries", *of_queries, ffi::S32, shape.batch * shape.queries},
       {"the segments of the keys", *of_keys, ffi::S32, shape.batch * shape.keys}});
  if (of_segments.failure()) return ffi::Unexpected(of_segments);
  options.query_segments = data<int32_t>(*of_queries);
  options.key_segments = data<int32_t>(*of_keys);
  options.segment_ranges = data<SegmentRange>(workspaces.segment_ranges);
  return call;
}

// The bias on the scores, (..., B or 1, N or 1, T, S). A leading axis of jax.vmap adds sequences.
ffi::ErrorOr<FlashScoreBias> score_bias_of(const Buffer& bias, const Buffer& q,
                                           const FlashShape& shape) {
  const auto sizes = bias.dimensions();
  const size_t axes = sizes.size();
  if (axes < 4) return ffi::Unexpected(invalid("bias", "has too few axes"));
  const bool is_float32 = bias.element_type() == ffi::F32;
  int64_t sequences = 1;
  for (size_t i = 0; i + 3 < axes; ++i) sequences *= sizes[i];
  const int64_t heads = sizes[axes - 3];
  if ((heads != 1 && heads != shape.heads) || sizes[axes - 2] != shape.queries ||
      sizes[axes - 1] != shape.keys ||
      (sequences == 0 ? shape.batch != 0 : shape.batch % sequences != 0)) {
    return ffi::Unexpected(invalid("bias", "does not fit q and k"));
  }
  const ffi::Error error = check_dtype(bias, is_float32 ? ffi::F32 : q.element_type(), "bias");
  if (error.failure()) return ffi::Unexpected(error);
  if (count(bias) == 0) return FlashScoreBias{};
  return FlashScoreBias{bias.untyped_data(), is_float32, sequences, heads, nullptr};
}

template <typename T>
void set_heads(const FlashShape& s, const Qkv& arrays, HeadRows<T>& q, HeadRows<T>& k,
               HeadRows<T>& v) {
  const int64_t of_queries = s.heads * s.width, of_keys = s.kv_heads * s.width;
  const int64_t of_values = s.kv_heads * s.value_width;
  const auto heads = [&](const Buffer& array, int64_t offset, int64_t row) -> HeadRows<T> {
    T* const first = static_cast<T*>(array.untyped_data());
    if (arrays.is_packed) return {first + offset, of_queries + 2 * of_keys};
    return {first, row};
  };
  q = heads(arrays.q, 0, of_queries);
  k = heads(arrays.k, of_queries, of_keys);
  v = heads(arrays.v, of_queries + of_keys, of_values);
}

ffi::Error launch_forward(cudaStream_t stream, const ffi::ErrorOr<FlashCall>& found, Result& out,
                          Result& lse) {
  if (found.has_error()) return found.error();
  const Qkv& qkv = found->qkv;
  const FlashShape& shape = found->shape;
  return dispatch_floating(qkv.q, qkv.is_packed ? "qkv" : "q", [&](auto type) {
    using T = typename decltype(type)::type;
    FlashForward<T> call{shape, found->options};
    set_heads(shape, qkv, call.q, call.k, call.v);
    call.out = {data<T>(out), shape.heads * shape.value_width};
    call.lse = data<float>(lse);
    return check_and_launch({{"out", *out, dtype_of<T>(), out_elements(shape)},
                             {"lse", *lse, ffi::F32, query_rows(shape)}},
                            [&] { return flash_attention_forward(stream, call); });
  });
}

ffi::Error launch_backward(cudaStream_t stream, const ffi::ErrorOr<FlashCall>& found,
                           const Buffer& out, const Buffer& lse, const Buffer& dout,
                           const Qkv& gradients, Result& delta) {
  if (found.has_error()) return found.error();
  const Qkv& qkv = found->qkv;
  const FlashShape& shape = found->shape;
  const ffi::DataType dtype = qkv.q.element_type();
  const ffi::Error error = qkv.is_packed
                               ? check_buffers({{"dqkv", gradients.q, dtype, count(qkv.q)}})
                               : check_buffers({{"dq", gradients.q, dtype, query_elements(shape)},
                                                {"dk", gradients.k, dtype, key_elements(shape)},
                                                {"dv", gradients.v, dtype, value_elements(shape)}});
  if (error.failure()) return error;
  return dispatch_floating(qkv.q, qkv.is_packed ? "qkv" : "q", [&](auto type) {
    using T = typename decltype(type)::type;
    FlashBackward<T> call{shape, found->options};
    set_heads(shape, qkv, call.q, call.k, call.v);
    set_heads(shape, gradients, call.dq, call.dk, call.dv);
    call.out = {data<T>(out), shape.heads * shape.value_width};
    call.dout = {data<T>(dout), shape.heads * shape.value_width};
    call.lse = data<float>(lse), call.delta = data<float>(delta), call.dlse = found->dlse;
    return check_and_launch({{"out", out, dtype_of<T>(), out_elements(shape)},
                             {"lse", lse, ffi::F32, query_rows(shape)},
                             {"dout", dout, dtype_of<T>(), out_elements(shape)},
                             {"delta", *delta, ffi::F32, query_rows(shape)}},
                            [&] { return flash_attention_backward(stream, call); });
  });
}

ffi::Error FlashAttentionForwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                     ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                     Result out, Result lse, Result segment_ranges, Result arranged,
                                     Result scratch) {
  const auto call =
      flash_call_of({q, k, v}, extras, attributes, {segment_ranges, arranged, scratch}, kForward);
  return launch_forward(stream, call, out, lse);
}

ffi::Error FlashAttentionBackwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v, Buffer out,
                                      Buffer lse, Buffer dout, ffi::RemainingArgs extras,
                                      ffi::Dictionary attributes, Result dq, Result dk, Result dv,
                                      Result delta, Result segment_ranges, Result arranged,
                                      Result scratch) {
  const auto call =
      flash_call_of({q, k, v}, extras, attributes, {segment_ranges, arranged, scratch}, kBackward);
  return launch_backward(stream, call, out, lse, dout, {*dq, *dk, *dv}, delta);
}

ffi::Error FlashAttentionPackedForwardImpl(cudaStream_t stream, Buffer qkv,
                                           ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                           Result out, Result lse, Result segment_ranges,
                                           Result arranged, Result scratch) {
  const auto call = flash_call_of(Qkv::packed(qkv), extras, attributes,
                                  {segment_ranges, arranged, scratch}, kForward);
  return launch_forward(stream, call, out, lse);
}

ffi::Error FlashAttentionPackedBackwardImpl(cudaStream_t stream, Buffer qkv, Buffer out, Buffer lse,
                                            Buffer dout, ffi::RemainingArgs extras,
                                            ffi::Dictionary attributes, Result dqkv, Result delta,
                                            Result segment_ranges, Result arranged,
                                            Result scratch) {
  const auto call = flash_call_of(Qkv::packed(qkv), extras, attributes,
                                  {segment_ranges, arranged, scratch}, kBackward);
  return launch_backward(stream, call, out, lse, dout, Qkv::packed(*dqkv), delta);
}

// Adds the bias to a call; its error, or that of the call, if there is one.
ffi::Error add_score_bias(const Buffer& bias, ffi::ErrorOr<FlashCall>& call) {
  if (call.has_error()) return call.error();
  if (call->options.scratch.bytes != 0) return invalid("hopper", "is not for a bias");
  const auto found = score_bias_of(bias, call->qkv.q, call->shape);
  if (found.has_error()) return found.error();
  call->options.score_bias = *found;
  return ffi::Error::Success();
}

ffi::Error FlashAttentionBiasForwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                         Buffer bias, ffi::RemainingArgs extras,
                                         ffi::Dictionary attributes, Result out, Result lse,
                                         Result segment_ranges, Result arranged, Result scratch) {
  auto call =
      flash_call_of({q, k, v}, extras, attributes, {segment_ranges, arranged, scratch}, kForward);
  const ffi::Error error = add_score_bias(bias, call);
  if (error.failure()) return error;
  return launch_forward(stream, call, out, lse);
}

ffi::Error FlashAttentionBiasBackwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                          Buffer bias, Buffer out, Buffer lse, Buffer dout,
                                          ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                          Result dq, Result dk, Result dv, Result dbias,
                                          Result delta, Result segment_ranges, Result arranged,
                                          Result scratch) {
  auto call =
      flash_call_of({q, k, v}, extras, attributes, {segment_ranges, arranged, scratch}, kBackward);
  ffi::Error error = add_score_bias(bias, call);
  if (error.success()) {
    error = check_buffers({{"dbias", *dbias, bias.element_type(), count(bias)}});
  }
  if (error.failure()) return error;
  call->options.score_bias.gradient = dbias->untyped_data();
  return launch_backward(stream, call, out, lse, dout, {*dq, *dk, *dv}, delta);
}

// The gradient of the projection's bias. A leading axis of jax.vmap adds groups.
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

// The caller knows neither where both arrays have no elements.
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
                                     Result arranged, Result scratch, Result dbias,
                                     Result partial) {
  auto call = flash_call_of(Qkv::packed(qkv), extras, attributes,
                            {segment_ranges, arranged, scratch}, kBackward);
  if (call.has_error()) return call.error();
  if (call->dlse != nullptr) return invalid("dlse", "is not for self-attention");
  if (call->options.by_parts) return invalid("by_parts", "is not for self-attention");
  const auto bias = bias_of(qkv, call->shape, *attributes.get<bool>("hopper"), dbias, partial);
  if (bias.has_error()) return bias.error();
  call->options.bias = *bias;
  const auto sums = sums_of(known_delta, dout_sums, call->shape);
  if (sums.has_error()) return sums.error();
  call->options.sums = *sums;
  return launch_backward(stream, call, out, lse, dout, Qkv::packed(*dqkv), delta);
}

ffi::Error FlashAttentionFloat8Impl(cudaStream_t stream, Buffer q, Buffer k, Buffer v,
                                    Buffer q_scale, Buffer k_scale, Buffer v_scale,
                                    ffi::RemainingArgs extras, ffi::Dictionary attributes,
                                    Result out, Result segment_ranges, Result arranged,
                                    Result scratch) {
  if (q.element_type() != ffi::F8E4M3FN) return invalid("q", "has not the dtype float8_e4m3fn");
  const auto call =
      flash_call_of({q, k, v}, extras, attributes, {segment_ranges, arranged, scratch},
                    {[](const FlashShape&) { return int64_t{0}; }, false});
  if (call.has_error()) return call.error();
  FlashForward<__nv_bfloat16, __nv_fp8_e4m3> part{call->shape, call->options};
  FlashShape& shape = part.shape;
  FlashOptions& options = part.options;
  if (options.rope.cos != nullptr) return invalid("rope", "is not for float8");
  if (options.sinks.data != nullptr) return invalid("sinks", "are not for float8");
  if (shape.value_width != shape.width) return invalid("v", "has not the width of k");
  // One set of scales serves all sequences; a leading axis of jax.vmap adds sets, and a launch
  // each.
  const int64_t sets = shape.heads == 0 ? 1 : count(q_scale) / shape.heads;
  if (sets == 0 || shape.batch % sets != 0) return invalid("q_scale", "does not fit q");
  const ffi::Error error = check_buffers({{"q_scale", q_scale, ffi::F32, sets * shape.heads},
                                          {"k_scale", k_scale, ffi::F32, sets * shape.kv_heads},
                                          {"v_scale", v_scale, ffi::F32, sets * shape.kv_heads},
                                          {"out", *out, ffi::BF16, query_elements(shape)}});
  if (error.failure()) return error;
  shape.batch /= sets;
  set_heads(shape, {q, k, v}, part.q, part.k, part.v);
  part.out = {data<__nv_bfloat16>(out), part.q.row_stride};
  part.q_scale = data<float>(q_scale);
  part.k_scale = data<float>(k_scale), part.v_scale = data<float>(v_scale);
  for (int64_t set = 0; set < sets; ++set) {
    const ffi::Error status = to_ffi_error(flash_attention_forward(stream, part));
    if (status.failure()) return status;
    part.q.data += query_elements(shape), part.out.data += query_elements(shape);
    part.k.data += key_elements(shape), part.v.data += key_elements(shape);
    part.q_scale += shape.heads;
    part.k_scale += shape.kv_heads, part.v_scale += shape.kv_heads;
    if (options.query_segments == nullptr) continue;
    options.query_segments += shape.batch * shape.queries;
    options.key_segments += shape.batch * shape.keys;
    options.segment_ranges += shape.batch * flash_segment_ranges(shape.queries, shape.keys);
  }
  return ffi::Error::Success();
}

}  // namespace

JAXLLM_HANDLER(FlashAttentionForward, FlashAttentionForwardImpl);
JAXLLM_HANDLER(FlashAttentionBackward, FlashAttentionBackwardImpl);
JAXLLM_HANDLER(FlashAttentionBiasForward, FlashAttentionBiasForwardImpl);
JAXLLM_HANDLER(FlashAttentionBiasBackward, FlashAttentionBiasBackwardImpl);
JAXLLM_HANDLER(FlashAttentionPackedForward, FlashAttentionPackedForwardImpl);
JAXLLM_HANDLER(FlashAttentionPackedBackward, FlashAttentionPackedBackwardImpl);
JAXLLM_HANDLER(SelfAttentionBackward, SelfAttentionBackwardImpl);
JAXLLM_HANDLER(FlashAttentionFloat8, FlashAttentionFloat8Impl);

}  // namespace jaxllm
