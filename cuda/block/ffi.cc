// FFI handler of the decode block: checks the buffers, dispatches on their dtypes, launches.
#include "common/ffi.h"

#include <cstdint>

#include "block/decode_block.h"
#include "common/launch.h"
#include "handlers.h"

namespace jaxllm {
namespace {

int64_t axis_from_end(const Buffer& buffer, size_t i) {
  const auto dimensions = buffer.dimensions();
  return i <= dimensions.size() ? dimensions[dimensions.size() - i] : -1;
}

// A weight of all calls, and for int8 its scales.
struct Weight {
  const char *name, *scales_name;
  int64_t size;  // of a call
  const void* data = nullptr;
  const float* scales = nullptr;
  int64_t groups = 0;  // scales of a call
};

// `arrays` has the four weights, and for int8 the four arrays of their scales. The bias and the
// norms of heads have no elements where there are none, nor have the block table and `keys` without
// pages, where `page` is 0.
ffi::Error DecodeBlockImpl(cudaStream_t stream, Buffer residual, Buffer norm1, Buffer norm2,
                           Buffer cos, Buffer sin, Buffer k_in, Buffer v_in, Buffer lengths,
                           Buffer qkv_bias, Buffer q_norm, Buffer k_norm, Buffer block_table,
                           Buffer keys, ffi::RemainingArgs arrays, float eps, bool ring,
                           int64_t window, int64_t page, int64_t splits, Result out, Result k_cache,
                           Result v_cache, Result qkv_out, Result q, Result attended, Result hidden,
                           Result activated, Result partial) {
  constexpr size_t kWeights = 4;
  const bool quantized = arrays.size() == 2 * kWeights;
  if (arrays.size() != kWeights && !quantized) {
    return ffi::Error::InvalidArgument("there are not four matrices, or four and their scales");
  }
  if (splits < 1) return invalid("splits", "is below 1");
  const ffi::ErrorOr<Buffer> qkv = arrays.get<Buffer>(0), down = arrays.get<Buffer>(3);
  if (qkv.has_error()) return qkv.error();
  if (down.has_error()) return down.error();

  BlockSizes sizes = {};
  sizes.batch = axis_from_end(residual, 2), sizes.width = axis_from_end(residual, 1);
  sizes.length = axis_from_end(k_in, 3), sizes.kv_heads = axis_from_end(k_in, 2);
  sizes.head_width = axis_from_end(k_in, 1), sizes.mlp_width = axis_from_end(*down, 1);
  sizes.splits = splits, sizes.ring = ring, sizes.window = window;
  if (window < 0 || window > INT32_MAX) return invalid("window", "is not within 0 and 2^31 - 1");
  if (page < 0 || page > INT32_MAX) return invalid("page", "is not within 0 and 2^31 - 1");
  if (page > 0) {
    if (sizes.length != page) return invalid("k_cache", "has pages of another size");
    sizes.page = page, sizes.pages = axis_from_end(k_in, 4);
    sizes.length = axis_from_end(block_table, 1) * page;
    if (sizes.pages < 0 || sizes.pages > INT32_MAX || (sizes.pages == 0 && sizes.length > 0)) {
      return invalid("k_cache", "has no pages, or too many");
    }
  }
  // The limits of decode attention.
  constexpr int64_t kMaxSequences = 65535, kMaxHeadWidth = 256, kMaxTokens = int64_t{1} << 30;
  if (sizes.batch < 1 || sizes.batch > kMaxSequences || sizes.width < 0) {
    return invalid("residual", "has too few axes, or no sequences, or too many");
  }
  if (sizes.length < 0 || sizes.length > kMaxTokens || sizes.kv_heads < 1 || sizes.head_width < 2 ||
      sizes.head_width > kMaxHeadWidth || sizes.head_width % 2 != 0) {
    return invalid("k_cache",
                   "has too few axes, or heads or a length that the kernels do not take");
  }
  if (sizes.mlp_width < 0) return invalid("down", "is a scalar");
  const int64_t kv_width = sizes.kv_heads * sizes.head_width;
  sizes.heads = axis_from_end(*qkv, 2) / sizes.head_width - 2 * sizes.kv_heads;
  if (sizes.heads < 1 || sizes.heads % sizes.kv_heads != 0) {
    return invalid("qkv", "does not fit the heads of k_cache");
  }
  // The leading axis of jax.vmap is as many calls.
  const int64_t calls = count(lengths) / sizes.batch, rows = sizes.batch;
  const int64_t heads_width = sizes.heads * sizes.head_width;
  const int64_t cache_rows = page > 0 ? sizes.pages * page : rows * sizes.length;
  const int64_t cache_size = cache_rows * kv_width;
  const int64_t entries = page > 0 ? rows * (sizes.length / page) : 0;
  const int64_t keys_size = page > 0 ? rows : 0;
  const int64_t qkv_size = heads_width + 2 * kv_width;
  const bool has_bias = count(qkv_bias) > 0, has_norms = count(q_norm) > 0;
  const int64_t bias_size = has_bias ? qkv_size : 0;
  const int64_t norm_size = has_norms ? sizes.head_width : 0;
  const int64_t qkv_out_size = has_norms ? rows * qkv_size : 0;
  const int64_t table_size = rows * (sizes.head_width / 2);
  const int64_t partial_size =
      splits > 1 ? splits * rows * sizes.heads * (sizes.head_width + 2) : 0;

  Weight all_weights[kWeights] = {
      {"qkv", "the scales of qkv", qkv_size * sizes.width},
      {"out", "the scales of out", sizes.width * heads_width},
      {"gate_up", "the scales of gate_up", 2 * sizes.mlp_width * sizes.width},
      {"down", "the scales of down", sizes.width * sizes.mlp_width}};
  const auto weight_dtype = quantized ? ffi::S8 : residual.element_type();
  for (size_t i = 0; i < kWeights; ++i) {
    Weight& weight = all_weights[i];
    const ffi::ErrorOr<Buffer> buffer = arrays.get<Buffer>(i);
    if (buffer.has_error()) return buffer.error();
    ffi::Error error = check_buffers({{weight.name, *buffer, weight_dtype, calls * weight.size}});
    if (error.failure()) return error;
    weight.data = buffer->untyped_data();
    if (!quantized) continue;
    const ffi::ErrorOr<Buffer> scales = arrays.get<Buffer>(kWeights + i);
    if (scales.has_error()) return scales.error();
    weight.groups = calls == 0 ? 0 : count(*scales) / calls;
    error = check_buffers({{weight.scales_name, *scales, ffi::F32, calls * weight.groups}});
    if (error.failure()) return error;
    weight.scales = data<float>(*scales);
  }
  // The groups of all weights have one length.
  int64_t group = 0;
  for (const Weight& weight : all_weights) {
    if (!quantized || weight.size == 0 || calls == 0) continue;
    if (weight.groups == 0 || weight.size % weight.groups != 0 ||
        (group != 0 && weight.size / weight.groups != group)) {
      return invalid(weight.scales_name, "are not one a group, of one length in all matrices");
    }
    group = weight.size / weight.groups;
  }
  // A group is a part of a row.
  if (group != 0 &&
      (sizes.width % group != 0 || heads_width % group != 0 || sizes.mlp_width % group != 0)) {
    return invalid("the scales of qkv", "are of groups that do not divide the rows of a matrix");
  }

  return dispatch_floating(residual, "residual", [&](auto type) {
    using T = typename decltype(type)::type;
    const ffi::DataType dtype = dtype_of<T>();
    const auto launch = [&](auto weight_type) {
      using W = typename decltype(weight_type)::type;
      JAXLLM_RETURN_IF_ERROR(copy_unless_aliased(stream, k_in, k_cache));
      JAXLLM_RETURN_IF_ERROR(copy_unless_aliased(stream, v_in, v_cache));
      for (int64_t call = 0; call < calls; ++call) {
        const auto weight = [&](int i) {
          const Weight& w = all_weights[i];
          return BlockWeight<W>{static_cast<const W*>(w.data) + call * w.size,
                                quantized ? w.scales + call * w.groups : nullptr};
        };
        const auto optional = [&](const Buffer& buffer, int64_t size) {
          return size == 0 ? nullptr : data<T>(buffer) + call * size;
        };
        const BlockWeights<T, W> weights = {data<T>(norm1) + call * sizes.width,
                                            data<T>(norm2) + call * sizes.width,
                                            optional(qkv_bias, bias_size),
                                            optional(q_norm, norm_size),
                                            optional(k_norm, norm_size),
                                            weight(0),
                                            weight(1),
                                            weight(2),
                                            weight(3),
                                            group};
        const BlockWorkspace<T> workspace = {data<T>(qkv_out) + call * qkv_out_size,
                                             data<T>(q) + call * rows * heads_width,
                                             data<T>(attended) + call * rows * heads_width,
                                             data<T>(hidden) + call * rows * sizes.width,
                                             data<T>(activated) + call * rows * sizes.mlp_width,
                                             data<float>(partial) + call * partial_size};
        const BlockCache<T> cache = {
            data<T>(k_cache) + call * cache_size, data<T>(v_cache) + call * cache_size,
            data<int32_t>(lengths) + call * rows,
            page > 0 ? data<int32_t>(block_table) + call * entries : nullptr,
            page > 0 ? data<int32_t>(keys) + call * rows : nullptr};
        JAXLLM_RETURN_IF_ERROR((TransformerBlock<T, W>::run(
            stream, data<T>(residual) + call * rows * sizes.width, weights,
            data<float>(cos) + call * table_size, data<float>(sin) + call * table_size, cache, eps,
            data<T>(out) + call * rows * sizes.width, workspace, sizes)));
      }
      return cudaSuccess;
    };
    return check_and_launch({{"residual", residual, dtype, calls * rows * sizes.width},
                             {"norm1", norm1, dtype, calls * sizes.width},
                             {"norm2", norm2, dtype, calls * sizes.width},
                             {"cos", cos, ffi::F32, calls * table_size},
                             {"sin", sin, ffi::F32, calls * table_size},
                             {"k_cache", k_in, dtype, calls * cache_size},
                             {"v_cache", v_in, dtype, calls * cache_size},
                             {"lengths", lengths, ffi::S32, calls * rows},
                             {"qkv_bias", qkv_bias, dtype, calls * bias_size},
                             {"q_norm", q_norm, dtype, calls * norm_size},
                             {"k_norm", k_norm, dtype, calls * norm_size},
                             {"block_table", block_table, ffi::S32, calls * entries},
                             {"keys", keys, ffi::S32, calls * keys_size},
                             {"out", *out, dtype, calls * rows * sizes.width},
                             {"the resulting k_cache", *k_cache, dtype, calls * cache_size},
                             {"the resulting v_cache", *v_cache, dtype, calls * cache_size},
                             {"qkv", *qkv_out, dtype, calls * qkv_out_size},
                             {"q", *q, dtype, calls * rows * heads_width},
                             {"attended", *attended, dtype, calls * rows * heads_width},
                             {"hidden", *hidden, dtype, calls * rows * sizes.width},
                             {"activated", *activated, dtype, calls * rows * sizes.mlp_width},
                             {"partial", *partial, ffi::F32, calls * partial_size}},
                            [&] { return quantized ? launch(Type<int8_t>{}) : launch(type); });
  });
}

}  // namespace

JAXLLM_HANDLER(DecodeBlock, DecodeBlockImpl, "eps", "ring", "window", "page", "splits");

}  // namespace jaxllm
