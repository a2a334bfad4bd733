// FFI handler of a block: checks the buffers, switches on their dtypes, launches.
#include "common/ffi.h"

#include "common/launch.h"
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

// A matrix of all calls, and for int8 its scales.
struct Matrix {
  const char *name, *name_of_scales;
  int64_t size;  // in a call
  const void* data = nullptr;
  const float* scales = nullptr;
  int64_t groups = 0;  // of numbers that share a scale, in a call
};

// The four matrices, and for int8 the four arrays of their scales.
ffi::Error DecodeBlockImpl(cudaStream_t stream, Buffer residual, Buffer norm1, Buffer norm2,
                           Buffer cos, Buffer sin, Buffer k_in, Buffer v_in, Buffer lengths,
                           ffi::RemainingArgs arrays, float eps, int64_t splits, Result out,
                           Result k_cache, Result v_cache, Result q, Result attended, Result hidden,
                           Result activated, Result partial) {
  constexpr size_t kMatrices = 4;
  const bool quantized = arrays.size() == 2 * kMatrices;
  if (arrays.size() != kMatrices && !quantized) {
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
  sizes.splits = splits;
  // As in decode_attention, which reads the caches.
  constexpr int64_t kMostSequences = 65535, kMostColumns = 256, kMostTokens = int64_t{1} << 30;
  if (sizes.batch < 1 || sizes.batch > kMostSequences || sizes.width < 0) {
    return invalid("residual", "has too few axes, or no sequences, or too many");
  }
  if (sizes.length < 0 || sizes.length > kMostTokens || sizes.kv_heads < 1 ||
      sizes.head_width < 2 || sizes.head_width > kMostColumns || sizes.head_width % 2 != 0) {
    return invalid("k_cache",
                   "has too few axes, or heads or a length that the kernels do not take");
  }
  if (sizes.mlp_width < 0) return invalid("down", "is a scalar");
  const int64_t kv_width = sizes.kv_heads * sizes.head_width;
  sizes.heads = axis_from_end(*qkv, 2) / sizes.head_width - 2 * sizes.kv_heads;
  if (sizes.heads < 1 || sizes.heads % sizes.kv_heads != 0) {
    return invalid("qkv", "does not fit the heads of k_cache");
  }
  // jax.vmap's new leading axis is as many calls.
  const int64_t calls = count(lengths) / sizes.batch, rows = sizes.batch;
  const int64_t heads_width = sizes.heads * sizes.head_width;
  const int64_t of_cache = rows * sizes.length * kv_width;
  const int64_t of_table = rows * (sizes.head_width / 2);
  const int64_t of_partial = splits > 1 ? splits * rows * sizes.heads * (sizes.head_width + 2) : 0;

  Matrix matrices[kMatrices] = {
      {"qkv", "the scales of qkv", (heads_width + 2 * kv_width) * sizes.width},
      {"out", "the scales of out", sizes.width * heads_width},
      {"gate_up", "the scales of gate_up", 2 * sizes.mlp_width * sizes.width},
      {"down", "the scales of down", sizes.width * sizes.mlp_width}};
  const auto matrix_type = quantized ? ffi::S8 : residual.element_type();
  for (size_t i = 0; i < kMatrices; ++i) {
    Matrix& matrix = matrices[i];
    const ffi::ErrorOr<Buffer> numbers = arrays.get<Buffer>(i);
    if (numbers.has_error()) return numbers.error();
    ffi::Error error = check_buffers({{matrix.name, *numbers, matrix_type, calls * matrix.size}});
    if (error.failure()) return error;
    matrix.data = numbers->untyped_data();
    if (!quantized) continue;
    const ffi::ErrorOr<Buffer> scales = arrays.get<Buffer>(kMatrices + i);
    if (scales.has_error()) return scales.error();
    matrix.groups = calls == 0 ? 0 : count(*scales) / calls;
    error = check_buffers({{matrix.name_of_scales, *scales, ffi::F32, calls * matrix.groups}});
    if (error.failure()) return error;
    matrix.scales = data<float>(*scales);
  }
  // Groups of one length, in each matrix.
  int64_t group = 0;
  for (const Matrix& matrix : matrices) {
    if (!quantized || matrix.size == 0 || calls == 0) continue;
    if (matrix.groups == 0 || matrix.size % matrix.groups != 0 ||
        (group != 0 && matrix.size / matrix.groups != group)) {
      return invalid(matrix.name_of_scales, "are not one a group, of one length in all matrices");
    }
    group = matrix.size / matrix.groups;
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
        const auto matrix = [&](int i) {
          const Matrix& m = matrices[i];
          return BlockMatrix<W>{static_cast<const W*>(m.data) + call * m.size,
                                quantized ? m.scales + call * m.groups : nullptr};
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
        JAXLLM_RETURN_IF_ERROR((TransformerBlock<T, W>::run(
            stream, data<T>(residual) + call * rows * sizes.width, weights,
            data<float>(cos) + call * of_table, data<float>(sin) + call * of_table,
            data<int32_t>(lengths) + call * rows, data<T>(k_cache) + call * of_cache,
            data<T>(v_cache) + call * of_cache, eps, data<T>(out) + call * rows * sizes.width,
            workspace, sizes)));
      }
      return cudaSuccess;
    };
    return check_and_launch({{"residual", residual, dtype, calls * rows * sizes.width},
                             {"norm1", norm1, dtype, calls * sizes.width},
                             {"norm2", norm2, dtype, calls * sizes.width},
                             {"cos", cos, ffi::F32, calls * of_table},
                             {"sin", sin, ffi::F32, calls * of_table},
                             {"k_cache", k_in, dtype, calls * of_cache},
                             {"v_cache", v_in, dtype, calls * of_cache},
                             {"lengths", lengths, ffi::S32, calls * rows},
                             {"out", *out, dtype, calls * rows * sizes.width},
                             {"the resulting k_cache", *k_cache, dtype, calls * of_cache},
                             {"the resulting v_cache", *v_cache, dtype, calls * of_cache},
                             {"q", *q, dtype, calls * rows * heads_width},
                             {"attended", *attended, dtype, calls * rows * heads_width},
                             {"hidden", *hidden, dtype, calls * rows * sizes.width},
                             {"activated", *activated, dtype, calls * rows * sizes.mlp_width},
                             {"partial", *partial, ffi::F32, calls * of_partial}},
                            [&] { return quantized ? launch(Type<int8_t>{}) : launch(type); });
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
