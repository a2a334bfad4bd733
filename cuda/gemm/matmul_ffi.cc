// FFI handlers of matrix products, and of those that are fused with what follows: check the
// buffers, switch on their dtype, launch.
#include "common/ffi.h"
#include "gemm/matmul.h"
#include "gemm/matmul_hopper.h"
#include "gemm/norm_layer.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// x (rows, width) times a matrix of `width` by `columns` elements. jax.vmap gives every buffer a
// new leading axis: so many calls.
struct Sizes {
  int64_t calls, rows, width, columns;
};

ffi::ErrorOr<Sizes> sizes_of(const Buffer& x, const Buffer& weight, const Buffer& bias,
                             const Buffer& out) {
  const auto of_x = x.dimensions(), of_out = out.dimensions();
  if (of_x.size() == 0 || of_out.size() == 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("x or out is a scalar"));
  }
  Sizes sizes{0, 0, of_x.back(), of_out.back()};
  if (sizes.width == 0 || sizes.columns == 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the matrix has no elements"));
  }
  const int64_t elements = static_cast<int64_t>(x.element_count());
  sizes.calls = static_cast<int64_t>(bias.element_count()) / sizes.columns;
  sizes.rows = sizes.calls == 0 ? 0 : elements / sizes.width / sizes.calls;
  if (static_cast<int64_t>(weight.element_count()) != sizes.calls * sizes.width * sizes.columns ||
      static_cast<int64_t>(out.element_count()) != sizes.calls * sizes.rows * sizes.columns) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("the shapes of x, weight and out do not fit"));
  }
  return sizes;
}

// Calls `launch(Type<T>, call)` for every call with the dtype of x.
template <class Launch>
ffi::Error for_each_call(const Buffer& x, int64_t calls, Launch launch) {
  const auto run = [&](auto type) {
    for (int64_t call = 0; call < calls; ++call) {
      const cudaError_t status = launch(type, call);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  };
  switch (x.element_type()) {
    case ffi::BF16:
      return run(Type<__nv_bfloat16>{});
    case ffi::F16:
      return run(Type<__half>{});
    default:
      return ffi::Error::InvalidArgument("dtype is not bfloat16 or float16");
  }
}

// The bytes of a call's slopes beside x, or another dtype's, which for_each_call refuses.
int64_t slope_bytes(const Buffer& x, int64_t rows, int64_t columns) {
  return x.element_type() == ffi::F16 ? MatmulHopper<__half>::slope_bytes(rows, columns)
                                      : MatmulHopper<__nv_bfloat16>::slope_bytes(rows, columns);
}

// What is saved for the backward is GELU's slope, or what GELU is applied to less the bias.
ffi::Error MatmulBiasGeluImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias, Result out,
                              Result saved, bool slope) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, bias, *out);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  const int64_t of_saved =
      slope ? slope_bytes(x, rows, columns) : rows * columns * static_cast<int64_t>(sizeof(__half));
  if (static_cast<int64_t>(saved->size_bytes()) != calls * of_saved) {
    return ffi::Error::InvalidArgument("saved has not the size for x, weight and slope");
  }
  return for_each_call(
      x, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        return MatmulHopper<T>::bias_gelu(
            stream, data<T>(x) + i * rows * width, data<T>(weight) + i * width * columns,
            data<T>(bias) + i * columns, slope, data<char>(saved) + i * of_saved,
            data<T>(out) + i * rows * columns, rows, width, columns);
      });
}

ffi::Error MatmulScaleImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer slopes, Result out,
                           Result sums, Result partial) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, *sums, *out);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  const int64_t of_slopes = slope_bytes(x, rows, columns);
  if (static_cast<int64_t>(slopes.size_bytes()) != calls * of_slopes) {
    return ffi::Error::InvalidArgument("slopes has not the size for x and weight");
  }
  const int64_t of_partial =
      calls == 0 ? 0 : static_cast<int64_t>(partial->element_count()) / calls;
  return for_each_call(
      x, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        return MatmulHopper<T>::scale(
            stream, data<T>(x) + i * rows * width, data<T>(weight) + i * width * columns,
            data<char>(slopes) + i * of_slopes, data<T>(out) + i * rows * columns,
            data<T>(sums) + i * columns, data<float>(partial) + i * of_partial, rows, width,
            columns);
      });
}

ffi::Error MatmulResidualImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias,
                              Buffer residual, Result out) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, bias, *out);
  if (sizes.has_error()) return sizes.error();
  if (residual.element_count() != out->element_count()) {
    return ffi::Error::InvalidArgument("residual has not the shape of out");
  }
  const auto [calls, rows, width, columns] = *sizes;
  return for_each_call(
      x, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        return MatmulHopper<T>::residual(
            stream, data<T>(x) + i * rows * width, data<T>(weight) + i * width * columns,
            data<T>(bias) + i * columns, data<T>(residual) + i * rows * columns,
            data<T>(out) + i * rows * columns, rows, width, columns);
      });
}

// The tokens of a sequence are the last axis of `sums`.
ffi::Error MatmulHeadSumsImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer saved,
                              Result out, Result sums, Result partial) {
  const auto of_x = x.dimensions(), of_out = out->dimensions(), of_sums = sums->dimensions();
  if (of_x.size() == 0 || of_out.size() == 0 || of_sums.size() == 0) {
    return ffi::Error::InvalidArgument("x, out or sums is a scalar");
  }
  const int64_t width = of_x.back(), columns = of_out.back(), tokens = of_sums.back();
  if (width == 0 || columns == 0 || tokens == 0) {
    return ffi::Error::InvalidArgument("the matrix has no elements, or a sequence no tokens");
  }
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  const int64_t calls = count(weight) / (width * columns);
  const int64_t rows = calls == 0 ? 0 : count(x) / width / calls;
  const int64_t of_each = rows * columns, heads_sums = of_each / kHeadSumColumns;
  const int64_t of_partial = rows / kHeadSumRows * columns;
  if (count(weight) != calls * width * columns || count(x) != calls * rows * width ||
      count(saved) != calls * of_each || count(*out) != calls * of_each || rows % tokens != 0 ||
      count(*sums) != calls * heads_sums || count(*partial) != calls * of_partial) {
    return ffi::Error::InvalidArgument("the shapes of x, weight, saved and the results do not fit");
  }
  return for_each_call(x, calls, [&](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    return MatmulHopper<T>::head_sums(
        stream, data<T>(x) + i * rows * width, data<T>(weight) + i * width * columns,
        data<T>(saved) + i * of_each, data<T>(out) + i * of_each,
        data<float>(sums) + i * heads_sums, data<float>(partial) + i * of_partial, tokens, rows,
        width, columns);
  });
}

// The sizes of a layer whose weight's columns run along the last axis, and the calls of jax.vmap.
ffi::ErrorOr<Sizes> sizes_of_layer(const Buffer& scale, const Buffer& norm_bias,
                                   const Buffer& weight, const Buffer& bias) {
  const auto of_scale = scale.dimensions(), of_weight = weight.dimensions();
  if (of_scale.size() == 0 || of_weight.size() == 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("scale or weight is a scalar"));
  }
  const int64_t width = of_scale.back(), columns = of_weight.back();
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  const int64_t calls = width == 0 ? 0 : count(scale) / width;
  if (count(norm_bias) != calls * width || count(weight) != calls * width * columns ||
      count(bias) != calls * columns) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("the shapes of scale, norm_bias, weight and bias do not fit"));
  }
  return Sizes{calls, 0, width, columns};
}

ffi::Error LayerWithNormImpl(cudaStream_t stream, Buffer scale, Buffer norm_bias, Buffer weight,
                             Buffer bias, Result with_weight, Result with_bias) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of_layer(scale, norm_bias, weight, bias);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  return for_each_call(weight, calls, [&, width = width, columns = columns](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    const int64_t row = i * width, column = i * columns, matrix = i * width * columns;
    const NormAndLayer<T> layer{data<T>(scale) + row,
                                data<T>(norm_bias) + row,
                                data<T>(weight) + matrix,
                                data<T>(bias) + column,
                                width,
                                columns};
    return NormLayer<T>::forward(stream, layer, data<T>(with_weight) + matrix,
                                 data<T>(with_bias) + column);
  });
}

ffi::Error LayerWithoutNormImpl(cudaStream_t stream, Buffer scale, Buffer norm_bias, Buffer weight,
                                Buffer dweight, Buffer dbias, Result of_scale, Result of_bias,
                                Result of_weight) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of_layer(scale, norm_bias, weight, dbias);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  if (dweight.element_count() != weight.element_count()) {
    return ffi::Error::InvalidArgument("dweight has not the shape of weight");
  }
  return for_each_call(weight, calls, [&, width = width, columns = columns](auto type, int64_t i) {
    using T = typename decltype(type)::type;
    const int64_t row = i * width, column = i * columns, matrix = i * width * columns;
    const NormAndLayer<T> layer{data<T>(scale) + row,
                                data<T>(norm_bias) + row,
                                data<T>(weight) + matrix,
                                nullptr,
                                width,
                                columns};
    return NormLayer<T>::backward(stream, layer, data<T>(dweight) + matrix, data<T>(dbias) + column,
                                  data<T>(of_scale) + row, data<T>(of_bias) + row,
                                  data<T>(of_weight) + matrix);
  });
}

// What comes of the residual, which is kept normalized, and of the product.
ffi::Error MatmulNormImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias, Buffer xhat,
                          Buffer mean, Buffer rstd, Result out, Result new_mean, Result new_rstd,
                          Result row_sums, float eps) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, bias, *out);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  const int64_t of_each = rows * columns;
  if (count(xhat) != calls * of_each || count(mean) != calls * rows ||
      count(rstd) != calls * rows || count(*new_mean) != calls * rows ||
      count(*new_rstd) != calls * rows) {
    return ffi::Error::InvalidArgument("the shapes of xhat, mean, rstd and the results do not fit");
  }
  const int64_t of_row_sums = calls == 0 ? 0 : count(*row_sums) / calls;
  return for_each_call(
      x, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        if (of_row_sums < MatmulHopper<T>::norm_row_sums(rows, columns)) {
          return cudaErrorInvalidValue;
        }
        return MatmulHopper<T>::norm(
            stream, data<T>(x) + i * rows * width, data<T>(weight) + i * width * columns,
            data<T>(bias) + i * columns, data<T>(xhat) + i * of_each, data<float>(mean) + i * rows,
            data<float>(rstd) + i * rows, eps, data<T>(out) + i * of_each,
            data<float>(new_mean) + i * rows, data<float>(new_rstd) + i * rows,
            data<float>(row_sums) + i * of_row_sums, rows, width, columns);
      });
}

// dx takes the place of dtotal.
ffi::Error MatmulNormGradientImpl(cudaStream_t stream, Buffer dout, Buffer weight, Buffer xhat,
                                  Buffer rstd, Buffer dtotal, Result dx, Result dtotal_sum,
                                  Result partial, Result row_sums) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(dout, weight, *dtotal_sum, *dx);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  const int64_t of_each = rows * columns;
  if (count(xhat) != calls * of_each || count(dtotal) != calls * of_each ||
      count(rstd) != calls * rows) {
    return ffi::Error::InvalidArgument("the shapes of xhat, rstd, dtotal and dx do not fit");
  }
  if (dtotal.untyped_data() != dx->untyped_data()) {
    return ffi::Error::InvalidArgument("dx is not in the place of dtotal");
  }
  const int64_t of_partial = calls == 0 ? 0 : count(*partial) / calls;
  const int64_t of_row_sums = calls == 0 ? 0 : count(*row_sums) / calls;
  return for_each_call(
      dout, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        if (of_row_sums < MatmulHopper<T>::norm_row_sums(rows, columns)) {
          return cudaErrorInvalidValue;
        }
        return MatmulHopper<T>::norm_gradient(
            stream, data<T>(dout) + i * rows * width, data<T>(weight) + i * width * columns,
            data<T>(xhat) + i * of_each, data<float>(rstd) + i * rows, data<T>(dx) + i * of_each,
            data<T>(dtotal_sum) + i * columns, data<float>(partial) + i * of_partial, of_partial,
            data<float>(row_sums) + i * of_row_sums, rows, width, columns);
      });
}

// jax.vmap gives every buffer the same new leading axes. No bias, and no h, have no elements.
ffi::Error MatmulImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer bias, Result out, Result h,
                      bool transpose_a, bool transpose_b, bool gelu, bool tf32) {
  const auto of_a = a.dimensions(), of_b = b.dimensions(), of_out = out->dimensions();
  const size_t axes = of_a.size();
  if (axes < 2 || of_b.size() != axes || of_out.size() != axes ||
      a.element_type() != b.element_type() || a.element_type() != bias.element_type()) {
    return ffi::Error::InvalidArgument("a, b, bias and out have not the axes or the dtype of a");
  }
  const int64_t rows = of_out[axes - 2], columns = of_out[axes - 1];
  const int64_t depth = of_a[axes - (transpose_a ? 2 : 1)];
  int64_t calls = 1;
  for (size_t i = 0; i + 2 < axes; ++i) calls *= of_a[i];
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  const bool has_bias = count(bias) > 0;
  if (count(a) != calls * rows * depth || count(b) != calls * depth * columns ||
      count(*out) != calls * rows * columns || (has_bias && count(bias) != calls * columns) ||
      (gelu && count(*h) != count(*out))) {
    return ffi::Error::InvalidArgument("the shapes of a, b, bias and out do not fit together");
  }
  return dispatch_floating(a.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const bool wide = out->element_type() == ffi::F32;
    if ((!wide && out->element_type() != a.element_type()) ||
        h->element_type() != out->element_type()) {
      return ffi::Error::InvalidArgument("out or h has not the dtype of a, nor float32");
    }
    const int64_t bytes = wide ? 4 : sizeof(T);
    for (int64_t i = 0; i < calls; ++i) {
      const int64_t result = i * rows * columns * bytes;
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
