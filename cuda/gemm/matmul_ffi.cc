// FFI handlers of matrix products, and of those that are fused with what follows: check the
// buffers, switch on their dtype, launch.
#include <algorithm>
#include <utility>

#include "common/ffi.h"
#include "common/launch.h"
#include "gemm/matmul.h"
#include "gemm/matmul_hopper.h"
#include "gemm/norm_layer.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// x (rows, width) times a matrix of `width` by `columns` elements. jax.vmap gives every buffer the
// same new leading axes: so many calls.
struct Sizes {
  int64_t calls, rows, width, columns;
};

// Of a matrix (width, columns), or turned (columns, width). The rows are left open.
ffi::ErrorOr<Sizes> sizes_of_matrix(const Buffer& weight, bool turned) {
  const auto of_weight = weight.dimensions();
  const size_t axes = of_weight.size();
  if (axes < 2) return ffi::Unexpected(invalid("weight", "is no matrix"));
  Sizes sizes{1, 0, of_weight[axes - 2], of_weight[axes - 1]};
  if (turned) std::swap(sizes.width, sizes.columns);
  for (size_t i = 0; i + 2 < axes; ++i) sizes.calls *= of_weight[i];
  return sizes;
}

ffi::ErrorOr<Sizes> sizes_of(const Buffer& x, const Buffer& weight, bool turned,
                             const char* name = "x") {
  ffi::ErrorOr<Sizes> sizes = sizes_of_matrix(weight, turned);
  if (sizes.has_error()) return sizes;
  const auto of_x = x.dimensions();
  if (of_x.size() == 0 || of_x.back() != sizes->width) {
    return ffi::Unexpected(invalid(name, "has not the width of weight"));
  }
  const int64_t of_row = sizes->calls * sizes->width;
  if (of_row > 0) sizes->rows = count(x) / of_row;
  return sizes;
}

// Calls `launch(Type<T>, call)` for every call with the dtype of a buffer, which has 16 bits.
template <class Launch>
ffi::Error for_each_call(const Buffer& buffer, const char* name, int64_t calls, Launch launch) {
  const auto run = [&](auto type) {
    for (int64_t call = 0; call < calls; ++call) {
      const cudaError_t status = launch(type, call);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  };
  switch (buffer.element_type()) {
    case ffi::BF16:
      return run(Type<__nv_bfloat16>{});
    case ffi::F16:
      return run(Type<__half>{});
    default:
      return invalid(name, "has dtype " + dtype_name(buffer.element_type()) +
                               "; bfloat16 or float16 is required");
  }
}

// What does not hang on the dtype.
using AnyMatmul = MatmulHopper<__nv_bfloat16>;

// What is saved for the backward is GELU's slope, or what GELU is applied to less the bias.
ffi::Error MatmulBiasGeluImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias, Result out,
                              Result saved, bool slope) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, false);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_out = s.rows * s.columns;
  const int64_t of_saved = slope ? AnyMatmul::slope_elements(s.rows, s.columns) : of_out;
  const ffi::Error error = check_buffers({
      {"x", x, dtype, s.calls * s.rows * s.width},
      {"weight", weight, dtype, s.calls * s.width * s.columns},
      {"bias", bias, dtype, s.calls * s.columns},
      {"out", *out, dtype, s.calls * of_out},
      {"saved", *saved, dtype, s.calls * of_saved},
  });
  if (error.failure()) return error;
  return for_each_call(x, "x", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::bias_gelu(
        stream, data<T>(x) + i * s.rows * s.width, data<T>(weight) + i * s.width * s.columns,
        data<T>(bias) + i * s.columns, slope, data<T>(saved) + i * of_saved,
        data<T>(out) + i * of_out, s.rows, s.width, s.columns);
  });
}

ffi::Error MatmulScaleImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer slopes, Result out,
                           Result sums, Result partial) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, true);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_slopes = AnyMatmul::slope_elements(s.rows, s.columns);
  const int64_t of_partial = divide_up(s.rows, kScaleRows) * s.columns;
  const ffi::Error error = check_buffers({
      {"x", x, dtype, s.calls * s.rows * s.width},
      {"weight", weight, dtype, s.calls * s.width * s.columns},
      {"slopes", slopes, dtype, s.calls * of_slopes},
      {"out", *out, dtype, s.calls * s.rows * s.columns},
      {"sums", *sums, dtype, s.calls * s.columns},
      {"partial", *partial, ffi::F32, s.calls * of_partial},
  });
  if (error.failure()) return error;
  return for_each_call(x, "x", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::scale(
        stream, data<T>(x) + i * s.rows * s.width, data<T>(weight) + i * s.width * s.columns,
        data<T>(slopes) + i * of_slopes, data<T>(out) + i * s.rows * s.columns,
        data<T>(sums) + i * s.columns, data<float>(partial) + i * of_partial, s.rows, s.width,
        s.columns);
  });
}

ffi::Error MatmulResidualImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias,
                              Buffer residual, Result out) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, false);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_out = s.rows * s.columns;
  const ffi::Error error = check_buffers({
      {"x", x, dtype, s.calls * s.rows * s.width},
      {"weight", weight, dtype, s.calls * s.width * s.columns},
      {"bias", bias, dtype, s.calls * s.columns},
      {"residual", residual, dtype, s.calls * of_out},
      {"out", *out, dtype, s.calls * of_out},
  });
  if (error.failure()) return error;
  return for_each_call(x, "x", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::residual(stream, data<T>(x) + i * s.rows * s.width,
                                     data<T>(weight) + i * s.width * s.columns,
                                     data<T>(bias) + i * s.columns, data<T>(residual) + i * of_out,
                                     data<T>(out) + i * of_out, s.rows, s.width, s.columns);
  });
}

// The tokens of a sequence are the last axis of `sums`.
ffi::Error MatmulHeadSumsImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer saved,
                              Result out, Result sums, Result partial) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, true);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = x.element_type();
  const auto of_sums = sums->dimensions();
  const int64_t tokens = of_sums.size() == 0 ? 0 : of_sums.back();
  if (tokens == 0 || tokens % kHeadSumRows != 0 || s.rows % tokens != 0 ||
      s.columns % kHeadSumColumns != 0) {
    return invalid("sums", "has not the tokens of whole tiles, sequences and heads of out");
  }
  const int64_t of_out = s.rows * s.columns, of_heads = of_out / kHeadSumColumns;
  const int64_t of_partial = s.rows / kHeadSumRows * s.columns;
  const ffi::Error error = check_buffers({
      {"x", x, dtype, s.calls * s.rows * s.width},
      {"weight", weight, dtype, s.calls * s.width * s.columns},
      {"saved", saved, dtype, s.calls * of_out},
      {"out", *out, dtype, s.calls * of_out},
      {"sums", *sums, ffi::F32, s.calls * of_heads},
      {"partial", *partial, ffi::F32, s.calls * of_partial},
  });
  if (error.failure()) return error;
  return for_each_call(x, "x", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::head_sums(
        stream, data<T>(x) + i * s.rows * s.width, data<T>(weight) + i * s.width * s.columns,
        data<T>(saved) + i * of_out, data<T>(out) + i * of_out, data<float>(sums) + i * of_heads,
        data<float>(partial) + i * of_partial, tokens, s.rows, s.width, s.columns);
  });
}

ffi::Error LayerWithNormImpl(cudaStream_t stream, Buffer scale, Buffer norm_bias, Buffer weight,
                             Buffer bias, Result with_weight, Result with_bias) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of_matrix(weight, false);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = weight.element_type();
  const int64_t of_weight = s.width * s.columns;
  const ffi::Error error = check_buffers({
      {"scale", scale, dtype, s.calls * s.width},
      {"norm_bias", norm_bias, dtype, s.calls * s.width},
      {"weight", weight, dtype, s.calls * of_weight},
      {"bias", bias, dtype, s.calls * s.columns},
      {"with_weight", *with_weight, dtype, s.calls * of_weight},
      {"with_bias", *with_bias, dtype, s.calls * s.columns},
  });
  if (error.failure()) return error;
  return for_each_call(weight, "weight", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    const int64_t row = i * s.width, column = i * s.columns, matrix = i * of_weight;
    const NormAndLayer<T> layer{data<T>(scale) + row,
                                data<T>(norm_bias) + row,
                                data<T>(weight) + matrix,
                                data<T>(bias) + column,
                                s.width,
                                s.columns};
    return NormLayer<T>::forward(stream, layer, data<T>(with_weight) + matrix,
                                 data<T>(with_bias) + column);
  });
}

ffi::Error LayerWithoutNormImpl(cudaStream_t stream, Buffer scale, Buffer norm_bias, Buffer weight,
                                Buffer dweight, Buffer dbias, Result of_scale, Result of_bias,
                                Result of_weight) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of_matrix(weight, false);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = weight.element_type();
  const int64_t of_matrix = s.width * s.columns;
  const ffi::Error error = check_buffers({
      {"scale", scale, dtype, s.calls * s.width},
      {"norm_bias", norm_bias, dtype, s.calls * s.width},
      {"weight", weight, dtype, s.calls * of_matrix},
      {"dweight", dweight, dtype, s.calls * of_matrix},
      {"dbias", dbias, dtype, s.calls * s.columns},
      {"of_scale", *of_scale, dtype, s.calls * s.width},
      {"of_bias", *of_bias, dtype, s.calls * s.width},
      {"of_weight", *of_weight, dtype, s.calls * of_matrix},
  });
  if (error.failure()) return error;
  return for_each_call(weight, "weight", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    const int64_t row = i * s.width, column = i * s.columns, matrix = i * of_matrix;
    const NormAndLayer<T> layer{data<T>(scale) + row,
                                data<T>(norm_bias) + row,
                                data<T>(weight) + matrix,
                                nullptr,
                                s.width,
                                s.columns};
    return NormLayer<T>::backward(stream, layer, data<T>(dweight) + matrix, data<T>(dbias) + column,
                                  data<T>(of_scale) + row, data<T>(of_bias) + row,
                                  data<T>(of_weight) + matrix);
  });
}

// What comes of the residual, which is kept normalized, and of the product.
ffi::Error MatmulNormImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias, Buffer xhat,
                          Buffer mean, Buffer rstd, Result out, Result new_mean, Result new_rstd,
                          Result row_sums, float eps) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, false);
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_out = s.rows * s.columns;
  const int64_t of_row_sums = AnyMatmul::norm_row_sums(s.rows, s.columns);
  const ffi::Error error = check_buffers({
      {"x", x, dtype, s.calls * s.rows * s.width},
      {"weight", weight, dtype, s.calls * s.width * s.columns},
      {"bias", bias, dtype, s.calls * s.columns},
      {"xhat", xhat, dtype, s.calls * of_out},
      {"mean", mean, ffi::F32, s.calls * s.rows},
      {"rstd", rstd, ffi::F32, s.calls * s.rows},
      {"out", *out, dtype, s.calls * of_out},
      {"new_mean", *new_mean, ffi::F32, s.calls * s.rows},
      {"new_rstd", *new_rstd, ffi::F32, s.calls * s.rows},
      {"row_sums", *row_sums, ffi::F32, s.calls * of_row_sums},
  });
  if (error.failure()) return error;
  return for_each_call(x, "x", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::norm(
        stream, data<T>(x) + i * s.rows * s.width, data<T>(weight) + i * s.width * s.columns,
        data<T>(bias) + i * s.columns, data<T>(xhat) + i * of_out, data<float>(mean) + i * s.rows,
        data<float>(rstd) + i * s.rows, eps, data<T>(out) + i * of_out,
        data<float>(new_mean) + i * s.rows, data<float>(new_rstd) + i * s.rows,
        data<float>(row_sums) + i * of_row_sums, s.rows, s.width, s.columns);
  });
}

// dx takes the place of dtotal. `partial` has rows for as many groups of clusters as may run.
ffi::Error MatmulNormGradientImpl(cudaStream_t stream, Buffer dout, Buffer weight, Buffer xhat,
                                  Buffer rstd, Buffer dtotal, Result dx, Result dtotal_sum,
                                  Result partial, Result row_sums) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(dout, weight, true, "dout");
  if (sizes.has_error()) return sizes.error();
  const Sizes s = *sizes;
  const ffi::DataType dtype = dout.element_type();
  const int64_t of_dx = s.rows * s.columns, of_group = kNormPartialRows * s.columns;
  const int64_t of_row_sums = AnyMatmul::norm_row_sums(s.rows, s.columns);
  const int64_t of_groups = s.calls * of_group;
  const int64_t groups = of_groups == 0 ? 1 : std::max<int64_t>(1, count(*partial) / of_groups);
  const int64_t of_partial = groups * of_group;
  const ffi::Error error = check_buffers({
      {"dout", dout, dtype, s.calls * s.rows * s.width},
      {"weight", weight, dtype, s.calls * s.width * s.columns},
      {"xhat", xhat, dtype, s.calls * of_dx},
      {"rstd", rstd, ffi::F32, s.calls * s.rows},
      {"dtotal", dtotal, dtype, s.calls * of_dx},
      {"dx", *dx, dtype, s.calls * of_dx},
      {"dtotal_sum", *dtotal_sum, dtype, s.calls * s.columns},
      {"partial", *partial, ffi::F32, s.calls * of_partial},
      {"row_sums", *row_sums, ffi::F32, s.calls * of_row_sums},
  });
  if (error.failure()) return error;
  if (const cudaError_t status = copy_unless_aliased(stream, dtotal, dx)) {
    return to_ffi_error(status);
  }
  return for_each_call(dout, "dout", s.calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::norm_gradient(
        stream, data<T>(dout) + i * s.rows * s.width, data<T>(weight) + i * s.width * s.columns,
        data<T>(xhat) + i * of_dx, data<float>(rstd) + i * s.rows, data<T>(dx) + i * of_dx,
        data<T>(dtotal_sum) + i * s.columns, data<float>(partial) + i * of_partial, of_partial,
        data<float>(row_sums) + i * of_row_sums, s.rows, s.width, s.columns);
  });
}

// jax.vmap gives every buffer the same new leading axes. No bias, and no h, have no elements.
ffi::Error MatmulImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer bias, Result out, Result h,
                      bool transpose_a, bool transpose_b, bool gelu, bool tf32) {
  const auto of_a = a.dimensions(), of_b = b.dimensions();
  const size_t axes = of_a.size();
  if (axes < 2 || of_b.size() != axes) {
    return invalid("b", "has not the axes of a, or a is no matrix");
  }
  const int64_t rows = of_a[axes - (transpose_a ? 1 : 2)];
  const int64_t depth = of_a[axes - (transpose_a ? 2 : 1)];
  const int64_t columns = of_b[axes - (transpose_b ? 2 : 1)];
  if (of_b[axes - (transpose_b ? 1 : 2)] != depth) {
    return invalid("b", "has not the depth of a");
  }
  int64_t calls = 1;
  for (size_t i = 0; i + 2 < axes; ++i) calls *= of_a[i];
  return dispatch_floating(a, "a", [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr ffi::DataType dtype = dtype_of<T>();
    const bool wide = out->element_type() == ffi::F32;
    const ffi::DataType of_result = wide ? ffi::F32 : dtype;
    const bool has_bias = count(bias) > 0;
    const int64_t of_out = rows * columns;
    const ffi::Error error = check_buffers({
        {"a", a, dtype, calls * rows * depth},
        {"b", b, dtype, calls * depth * columns},
        {"bias", bias, dtype, has_bias ? calls * columns : 0},
        {"out", *out, of_result, calls * of_out},
        {"h", *h, of_result, gelu ? calls * of_out : 0},
    });
    if (error.failure()) return error;
    const int64_t bytes = wide ? 4 : sizeof(T);
    for (int64_t i = 0; i < calls; ++i) {
      const int64_t result = i * of_out * bytes;
      const MatmulCall<T> call{rows,
                               columns,
                               depth,
                               data<T>(a) + i * rows * depth,
                               data<T>(b) + i * depth * columns,
                               transpose_a,
                               transpose_b,
                               has_bias ? data<T>(bias) + i * columns : nullptr,
                               gelu,
                               tf32,
                               wide,
                               gelu ? data<char>(h) + result : nullptr,
                               data<char>(out) + result};
      const cudaError_t status = MatrixProduct<T>::run(stream, call);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, MatmulImpl,
                              stream_binding()
                                  .Arg<Buffer>()  // a
                                  .Arg<Buffer>()  // b
                                  .Arg<Buffer>()  // bias
                                  .Ret<Buffer>()  // out
                                  .Ret<Buffer>()  // h
                                  .Attr<bool>("transpose_a")
                                  .Attr<bool>("transpose_b")
                                  .Attr<bool>("gelu")
                                  .Attr<bool>("tf32"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulBiasGelu, MatmulBiasGeluImpl,
                              stream_binding()
                                  .Arg<Buffer>()  // x
                                  .Arg<Buffer>()  // weight
                                  .Arg<Buffer>()  // bias
                                  .Ret<Buffer>()  // out
                                  .Ret<Buffer>()  // saved
                                  .Attr<bool>("slope"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulScale, MatmulScaleImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // slopes
                                  .Ret<Buffer>()   // out
                                  .Ret<Buffer>()   // sums
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulHeadSums, MatmulHeadSumsImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // saved
                                  .Ret<Buffer>()   // out
                                  .Ret<Buffer>()   // sums
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerWithNorm, LayerWithNormImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // scale
                                  .Arg<Buffer>()   // norm_bias
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // bias
                                  .Ret<Buffer>()   // with_weight
                                  .Ret<Buffer>(),  // with_bias
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerWithoutNorm, LayerWithoutNormImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // scale
                                  .Arg<Buffer>()   // norm_bias
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // dweight
                                  .Arg<Buffer>()   // dbias
                                  .Ret<Buffer>()   // of_scale
                                  .Ret<Buffer>()   // of_bias
                                  .Ret<Buffer>(),  // of_weight
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulNorm, MatmulNormImpl,
                              stream_binding()
                                  .Arg<Buffer>()  // x
                                  .Arg<Buffer>()  // weight
                                  .Arg<Buffer>()  // bias
                                  .Arg<Buffer>()  // xhat
                                  .Arg<Buffer>()  // mean
                                  .Arg<Buffer>()  // rstd
                                  .Ret<Buffer>()  // out
                                  .Ret<Buffer>()  // new_mean
                                  .Ret<Buffer>()  // new_rstd
                                  .Ret<Buffer>()  // row_sums
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulNormGradient, MatmulNormGradientImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // dout
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // xhat
                                  .Arg<Buffer>()   // rstd
                                  .Arg<Buffer>()   // dtotal
                                  .Ret<Buffer>()   // dx
                                  .Ret<Buffer>()   // dtotal_sum
                                  .Ret<Buffer>()   // partial
                                  .Ret<Buffer>(),  // row_sums
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulResidual, MatmulResidualImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // bias
                                  .Arg<Buffer>()   // residual
                                  .Ret<Buffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
