// FFI handlers of the normalization kernels: check the buffers, switch on their dtypes, launch.
#include "common/ffi.h"

#include "handlers.h"
#include "norm/layer_norm.h"
#include "norm/rms_norm.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// The sizes of a call. jax.vmap gives every buffer a new leading axis; the weights have no other,
// so their rows count the independent groups.
struct Shape {
  int64_t groups, rows, width;

  int64_t weights() const { return groups * width; }
  int64_t statistics() const { return groups * rows; }
  int64_t elements() const { return groups * rows * width; }
};

// Groups are the y axis of a grid, three times as many where three weights have gradients.
constexpr int64_t kMaxGroups = 65535 / 3;
constexpr int64_t kMaxPartialRows = 65535;  // the z axis of a grid

ffi::ErrorOr<Shape> shape_of(const Buffer& x, const char* name, const Buffer& scale) {
  if (x.dimensions().size() == 0) return ffi::Unexpected(invalid(name, "is a scalar"));
  const int64_t width = x.dimensions().back();
  if (scale.dimensions().size() == 0 || scale.dimensions().back() != width) {
    return ffi::Unexpected(invalid("scale", std::string("is not as wide as ") + name));
  }
  if (ffi::Error error = check_leading_axes(x, name, scale, "scale", 1); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (width == 0) return Shape{0, 0, 0};
  const int64_t groups = count(scale) / width;
  const int64_t rows = groups == 0 ? 0 : count(x) / width / groups;
  if (groups > kMaxGroups) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax.vmap maps over " + std::to_string(groups) + " calls; at most " +
        std::to_string(kMaxGroups) + " are supported"));
  }
  return Shape{groups, rows, width};
}

// Calls `launch(Type<T>, Type<W>, shape)` with the dtypes of the rows and of the weights.
template <class Launch>
ffi::Error dispatch(const Buffer& x, const char* name, const Buffer& scale, Launch launch) {
  const ffi::ErrorOr<Shape> shape = shape_of(x, name, scale);
  if (shape.has_error()) return shape.error();
  if (shape->width == 0) return ffi::Error::Success();
  return dispatch_floating(x, name, [&](auto row_type) {
    if (scale.element_type() == x.element_type()) return launch(row_type, row_type, *shape);
    if (scale.element_type() == ffi::F32) return launch(row_type, Type<float>{}, *shape);
    return invalid("scale", "has dtype " + dtype_name(scale.element_type()) + "; that of " + name +
                                " or float32 is required");
  });
}

// A row statistic, or null for one without elements: it is not asked for.
float* statistic(Result& result) { return count(*result) ? data<float>(result) : nullptr; }

// The gradient along the stream, null for one without elements: nothing comes along it.
template <typename T>
const T* of_stream(const Buffer& dh) {
  return count(dh) ? data<T>(dh) : nullptr;
}

// The rows of `partial`, the workspace of `sums` sums: (groups, sums, rows, width).
ffi::ErrorOr<int64_t> partial_rows_of(Result& partial, const Shape& shape, int64_t sums) {
  const auto axes = partial->dimensions();
  if (axes.size() < 2) return ffi::Unexpected(invalid("partial", "has fewer than two axes"));
  const int64_t rows = axes[axes.size() - 2];
  if (rows > kMaxPartialRows || (rows == 0 && shape.rows > 0)) {
    return ffi::Unexpected(
        invalid("partial", "has " + std::to_string(rows) + " rows; 1 to 65535 are required"));
  }
  ffi::Error error =
      check_buffer({"partial", *partial, ffi::F32, shape.groups * sums * rows * shape.width});
  if (error.failure()) return ffi::Unexpected(error);
  return rows;
}

ffi::Error LayerNormForwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer bias, float eps,
                                Result out, Result mean, Result rstd) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"bias", bias, dtype_of<W>(), shape.weights()},
            {"out", *out, dtype_of<T>(), shape.elements()},
            {"mean", *mean, ffi::F32, shape.statistics(), Elements::kExactlyOrNone},
            {"rstd", *rstd, ffi::F32, count(*mean)},
        },
        [&] {
          return LayerNorm<T, W>::forward(stream, data<T>(x), nullptr, nullptr, data<W>(scale),
                                          data<W>(bias), eps, data<T>(out), nullptr,
                                          statistic(mean), statistic(rstd), shape.groups,
                                          shape.rows, shape.width);
        });
  });
}

// An x_bias without elements stands for none, here and in the backward.
ffi::Error AddLayerNormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer x_bias,
                                   Buffer scale, Buffer bias, float eps, Result out, Result h,
                                   Result mean, Result rstd) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"residual", residual, dtype_of<T>(), shape.elements()},
            {"x_bias", x_bias, dtype_of<W>(), shape.weights(), Elements::kExactlyOrNone},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"bias", bias, dtype_of<W>(), shape.weights()},
            {"out", *out, dtype_of<T>(), shape.elements()},
            {"h", *h, dtype_of<T>(), shape.elements()},
            {"mean", *mean, ffi::F32, shape.statistics(), Elements::kExactlyOrNone},
            {"rstd", *rstd, ffi::F32, count(*mean)},
        },
        [&] {
          const W* bias_of_x = count(x_bias) ? data<W>(x_bias) : nullptr;
          return LayerNorm<T, W>::forward(stream, data<T>(x), data<T>(residual), bias_of_x,
                                          data<W>(scale), data<W>(bias), eps, data<T>(out),
                                          data<T>(h), statistic(mean), statistic(rstd),
                                          shape.groups, shape.rows, shape.width);
        });
  });
}

ffi::Error LayerNormBackwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer mean,
                                 Buffer rstd, Buffer dout, Result dx, Result dscale, Result dbias,
                                 Result partial) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(partial, shape, 2);
    if (partial_rows.has_error()) return partial_rows.error();
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"mean", mean, ffi::F32, shape.statistics()},
            {"rstd", rstd, ffi::F32, shape.statistics()},
            {"dout", dout, dtype_of<T>(), shape.elements()},
            {"dx", *dx, dtype_of<T>(), shape.elements()},
            {"dscale", *dscale, dtype_of<W>(), shape.weights()},
            {"dbias", *dbias, dtype_of<W>(), shape.weights()},
        },
        [&] {
          return LayerNorm<T, W>::backward(
              stream, data<T>(x), data<W>(scale), data<float>(mean), data<float>(rstd),
              data<T>(dout), nullptr, data<T>(dx), data<W>(dscale), data<W>(dbias), nullptr,
              data<float>(partial), shape.groups, shape.rows, shape.width, *partial_rows);
        });
  });
}

ffi::Error AddLayerNormBackwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Buffer mean,
                                    Buffer rstd, Buffer dout, Buffer dh, Result dx, Result dscale,
                                    Result dbias, Result dx_bias, Result partial) {
  return dispatch(h, "h", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    W* const bias_of_x = count(*dx_bias) ? data<W>(dx_bias) : nullptr;
    const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(partial, shape, bias_of_x ? 3 : 2);
    if (partial_rows.has_error()) return partial_rows.error();
    return check_and_launch(
        {
            {"h", h, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"mean", mean, ffi::F32, shape.statistics()},
            {"rstd", rstd, ffi::F32, shape.statistics()},
            {"dout", dout, dtype_of<T>(), shape.elements()},
            {"dh", dh, dtype_of<T>(), shape.elements(), Elements::kExactlyOrNone},
            {"dx", *dx, dtype_of<T>(), shape.elements()},
            {"dscale", *dscale, dtype_of<W>(), shape.weights()},
            {"dbias", *dbias, dtype_of<W>(), shape.weights()},
            {"dx_bias", *dx_bias, dtype_of<W>(), shape.weights(), Elements::kExactlyOrNone},
        },
        [&] {
          return LayerNorm<T, W>::backward(stream, data<T>(h), data<W>(scale), data<float>(mean),
                                           data<float>(rstd), data<T>(dout), of_stream<T>(dh),
                                           data<T>(dx), data<W>(dscale), data<W>(dbias), bias_of_x,
                                           data<float>(partial), shape.groups, shape.rows,
                                           shape.width, *partial_rows);
        });
  });
}

ffi::Error RmsNormForwardImpl(cudaStream_t stream, Buffer x, Buffer scale, float eps, Result out,
                              Result rstd) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"out", *out, dtype_of<T>(), shape.elements()},
            {"rstd", *rstd, ffi::F32, shape.statistics(), Elements::kExactlyOrNone},
        },
        [&] {
          return RmsNorm<T, W>::forward(stream, data<T>(x), nullptr, data<W>(scale), eps,
                                        data<T>(out), nullptr, statistic(rstd), shape.groups,
                                        shape.rows, shape.width);
        });
  });
}

ffi::Error AddRmsNormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer scale,
                                 float eps, Result out, Result h, Result rstd) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"residual", residual, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"out", *out, dtype_of<T>(), shape.elements()},
            {"h", *h, dtype_of<T>(), shape.elements()},
            {"rstd", *rstd, ffi::F32, shape.statistics(), Elements::kExactlyOrNone},
        },
        [&] {
          return RmsNorm<T, W>::forward(stream, data<T>(x), data<T>(residual), data<W>(scale), eps,
                                        data<T>(out), data<T>(h), statistic(rstd), shape.groups,
                                        shape.rows, shape.width);
        });
  });
}

ffi::Error RmsNormBackwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer rstd,
                               Buffer dout, Result dx, Result dscale, Result partial) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(partial, shape, 1);
    if (partial_rows.has_error()) return partial_rows.error();
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"rstd", rstd, ffi::F32, shape.statistics()},
            {"dout", dout, dtype_of<T>(), shape.elements()},
            {"dx", *dx, dtype_of<T>(), shape.elements()},
            {"dscale", *dscale, dtype_of<W>(), shape.weights()},
        },
        [&] {
          return RmsNorm<T, W>::backward(stream, data<T>(x), data<W>(scale), data<float>(rstd),
                                         data<T>(dout), nullptr, data<T>(dx), data<W>(dscale),
                                         data<float>(partial), shape.groups, shape.rows,
                                         shape.width, *partial_rows);
        });
  });
}

ffi::Error AddRmsNormBackwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Buffer rstd,
                                  Buffer dout, Buffer dh, Result dx, Result dscale,
                                  Result partial) {
  return dispatch(h, "h", scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(partial, shape, 1);
    if (partial_rows.has_error()) return partial_rows.error();
    return check_and_launch(
        {
            {"h", h, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"rstd", rstd, ffi::F32, shape.statistics()},
            {"dout", dout, dtype_of<T>(), shape.elements()},
            {"dh", dh, dtype_of<T>(), shape.elements(), Elements::kExactlyOrNone},
            {"dx", *dx, dtype_of<T>(), shape.elements()},
            {"dscale", *dscale, dtype_of<W>(), shape.weights()},
        },
        [&] {
          return RmsNorm<T, W>::backward(stream, data<T>(h), data<W>(scale), data<float>(rstd),
                                         data<T>(dout), of_stream<T>(dh), data<T>(dx),
                                         data<W>(dscale), data<float>(partial), shape.groups,
                                         shape.rows, shape.width, *partial_rows);
        });
  });
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerNormForward, LayerNormForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()       // x
                                  .Arg<Buffer>()       // scale
                                  .Arg<Buffer>()       // bias
                                  .Attr<float>("eps")  //
                                  .Ret<Buffer>()       // out
                                  .Ret<Buffer>()       // mean
                                  .Ret<Buffer>(),      // rstd
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AddLayerNormForward, AddLayerNormForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()       // x
                                  .Arg<Buffer>()       // residual
                                  .Arg<Buffer>()       // x_bias
                                  .Arg<Buffer>()       // scale
                                  .Arg<Buffer>()       // bias
                                  .Attr<float>("eps")  //
                                  .Ret<Buffer>()       // out
                                  .Ret<Buffer>()       // h
                                  .Ret<Buffer>()       // mean
                                  .Ret<Buffer>(),      // rstd
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerNormBackward, LayerNormBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // scale
                                  .Arg<Buffer>()   // mean
                                  .Arg<Buffer>()   // rstd
                                  .Arg<Buffer>()   // dout
                                  .Ret<Buffer>()   // dx
                                  .Ret<Buffer>()   // dscale
                                  .Ret<Buffer>()   // dbias
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AddLayerNormBackward, AddLayerNormBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // h
                                  .Arg<Buffer>()   // scale
                                  .Arg<Buffer>()   // mean
                                  .Arg<Buffer>()   // rstd
                                  .Arg<Buffer>()   // dout
                                  .Arg<Buffer>()   // dh
                                  .Ret<Buffer>()   // dx
                                  .Ret<Buffer>()   // dscale
                                  .Ret<Buffer>()   // dbias
                                  .Ret<Buffer>()   // dx_bias
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNormForward, RmsNormForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()       // x
                                  .Arg<Buffer>()       // scale
                                  .Attr<float>("eps")  //
                                  .Ret<Buffer>()       // out
                                  .Ret<Buffer>(),      // rstd
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AddRmsNormForward, AddRmsNormForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()       // x
                                  .Arg<Buffer>()       // residual
                                  .Arg<Buffer>()       // scale
                                  .Attr<float>("eps")  //
                                  .Ret<Buffer>()       // out
                                  .Ret<Buffer>()       // h
                                  .Ret<Buffer>(),      // rstd
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNormBackward, RmsNormBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // scale
                                  .Arg<Buffer>()   // rstd
                                  .Arg<Buffer>()   // dout
                                  .Ret<Buffer>()   // dx
                                  .Ret<Buffer>()   // dscale
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AddRmsNormBackward, AddRmsNormBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // h
                                  .Arg<Buffer>()   // scale
                                  .Arg<Buffer>()   // rstd
                                  .Arg<Buffer>()   // dout
                                  .Arg<Buffer>()   // dh
                                  .Ret<Buffer>()   // dx
                                  .Ret<Buffer>()   // dscale
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
