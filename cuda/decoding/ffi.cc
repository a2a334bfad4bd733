// FFI handler of a block: checks the buffers, switches on their dtypes, launches.
#include "common/ffi.h"

#include "decoding/block.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

int64_t axis_from_end(const Buffer& buffer, size_t i) {
  const auto dimensions = buffer.dimensions();
  return i <= dimensions.size() ? dimensions[dimensions.size() - i] : -1;
}

// The four matrices, and for int8 the four arrays of their scales.
ffi::Error DecodeBlockImpl(cudaStream_t stream, Buffer residual, Buffer norm1, Buffer norm2,
                           Buffer cos, Buffer sin, Buffer k_in, Buffer v_in, Buffer lengths,
                           ffi::RemainingArgs matrices, float eps, int64_t splits, Result out,
                           Result k_cache, Result v_cache, Result q, Result attended, Result hidden,
                           Result activated, Result partial) {
  const bool quantized = matrices.size() == 8;
  if (matrices.size() != 4 && !quantized) {
    return ffi::Error::InvalidArgument("there are not four matrices, or four and their scales");
  }
  if (k_in.untyped_data() != k_cache->untyped_data() ||
      v_in.untyped_data() != v_cache->untyped_data()) {
    return ffi::Error::InvalidArgument("the caches are not written in place");
  }
  const ffi::ErrorOr<Buffer> qkv = matrices.get<Buffer>(0), down = matrices.get<Buffer>(3);
  if (qkv.has_error()) return qkv.error();
  if (down.has_error()) return down.error();

  BlockSizes sizes = {};
  sizes.batch = axis_from_end(residual, 2), sizes.width = axis_from_end(residual, 1);
  sizes.length = axis_from_end(k_in, 3), sizes.kv_heads = axis_from_end(k_in, 2);
  sizes.head_width = axis_from_end(k_in, 1), sizes.mlp_width = axis_from_end(*down, 1);
  sizes.splits = splits;
  if (sizes.batch < 1 || sizes.length < 0 || sizes.head_width < 2) {
    return ffi::Error::InvalidArgument("residual or k_cache has too few axes, or none");
  }
  sizes.heads = axis_from_end(*qkv, 2) / sizes.head_width - 2 * sizes.kv_heads;
  if (sizes.heads < 1 || sizes.heads % sizes.kv_heads != 0) {
    return ffi::Error::InvalidArgument("qkv does not fit the heads of k_cache");
  }
  // jax.vmap's new leading axis is as many calls.
  const int64_t calls = lengths.element_count() / sizes.batch;
  const int64_t heads_width = sizes.heads * sizes.head_width;
  const int64_t counts[4] = {(heads_width + 2 * sizes.kv_heads * sizes.head_width) * sizes.width,
                             sizes.width * heads_width, 2 * sizes.mlp_width * sizes.width,
                             sizes.width * sizes.mlp_width};
  const void* data_of[4];
  const float* scales_of[4] = {};
  int64_t groups_of[4] = {};
  for (size_t i = 0; i < 4; ++i) {
    const ffi::ErrorOr<Buffer> matrix = matrices.get<Buffer>(i);
    if (matrix.has_error()) return matrix.error();
    if (matrix->element_type() != (quantized ? ffi::S8 : residual.element_type()) ||
        static_cast<int64_t>(matrix->element_count()) != calls * counts[i]) {
      return ffi::Error::InvalidArgument("a matrix has not the dtype or the size it should have");
    }
    data_of[i] = matrix->untyped_data();
    if (!quantized) continue;
    const ffi::ErrorOr<Buffer> scales = matrices.get<Buffer>(4 + i);
    if (scales.has_error()) return scales.error();
    groups_of[i] = scales->element_count() / calls;
    if (scales->element_type() != ffi::F32 || groups_of[i] == 0 || counts[i] % groups_of[i] != 0 ||
        counts[i] / groups_of[i] != counts[0] / groups_of[0]) {
      return ffi::Error::InvalidArgument("the scales are not float32, one a group of one length");
    }
    scales_of[i] = data<float>(*scales);
  }
  const int64_t group = quantized ? counts[0] / groups_of[0] : 0;
  const int64_t of_cache = k_in.element_count() / calls, rows = sizes.batch;
  const int64_t of_partial = partial->element_count() / calls;
  if (splits > 1 && of_partial < splits * rows * sizes.heads * (sizes.head_width + 2)) {
    return ffi::Error::InvalidArgument("partial has no room for the splits");
  }

  return dispatch_floating(residual.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto weight_type) {
      using W = typename decltype(weight_type)::type;
      for (int64_t call = 0; call < calls; ++call) {
        const auto matrix = [&](int i) {
          return BlockMatrix<W>{static_cast<const W*>(data_of[i]) + call * counts[i],
                                quantized ? scales_of[i] + call * groups_of[i] : nullptr};
        };
        const BlockWeights<T, W> weights = {data<T>(norm1) + call * sizes.width,
                                            data<T>(norm2) + call * sizes.width,
                                            matrix(0),
                                            matrix(1),
                                            matrix(2),
                                            matrix(3),
                                            group};
        const BlockWorkspace<T> workspace = {data<T>(q) + call * rows * heads_width,
                                             data<T>(attended) + call * rows * heads_width,
                                             data<T>(hidden) + call * rows * sizes.width,
                                             data<T>(activated) + call * rows * sizes.mlp_width,
                                             data<float>(partial) + call * of_partial};
        const int64_t of_table = rows * (sizes.head_width / 2);
        const cudaError_t status = TransformerBlock<T, W>::run(
            stream, data<T>(residual) + call * rows * sizes.width, weights,
            data<float>(cos) + call * of_table, data<float>(sin) + call * of_table,
            data<int32_t>(lengths) + call * rows, data<T>(k_cache) + call * of_cache,
            data<T>(v_cache) + call * of_cache, eps, data<T>(out) + call * rows * sizes.width,
            workspace, sizes);
        if (status != cudaSuccess) return to_ffi_error(status);
      }
      return ffi::Error::Success();
    };
    return quantized ? run(Type<int8_t>{}) : run(type);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeBlock, DecodeBlockImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()            // residual
                                  .Arg<Buffer>()            // norm1
                                  .Arg<Buffer>()            // norm2
                                  .Arg<Buffer>()            // cos
                                  .Arg<Buffer>()            // sin
                                  .Arg<Buffer>()            // k_cache
                                  .Arg<Buffer>()            // v_cache
                                  .Arg<Buffer>()            // lengths
                                  .RemainingArgs()          // matrices, scales
                                  .Attr<float>("eps")       //
                                  .Attr<int64_t>("splits")  //
                                  .Ret<Buffer>()            // out
                                  .Ret<Buffer>()            // k_cache
                                  .Ret<Buffer>()            // v_cache
                                  .Ret<Buffer>()            // q
                                  .Ret<Buffer>()            // attended
                                  .Ret<Buffer>()            // hidden
                                  .Ret<Buffer>()            // activated
                                  .Ret<Buffer>(),           // partial
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
