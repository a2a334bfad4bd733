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
};

// Groups are the y axis of a grid, three times as many where three weights have gradients.
constexpr int64_t kMaxGroups = 65535 / 3;

ffi::ErrorOr<Shape> shape_of(const Buffer& x, const Buffer& scale) {
  if (x.dimensions().size() == 0)
    return ffi::Unexpected(ffi::Error::InvalidArgument("x is a scalar"));
  const int64_t width = x.dimensions().back();
  if (width == 0) return Shape{0, 0, 0};
  if (scale.dimensions().size() == 0 || scale.dimensions().back() != width) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("scale is not as wide as x"));
  }
  const int64_t groups = scale.element_count() / width;
  const int64_t rows = groups == 0 ? 0 : x.element_count() / width / groups;
  if (groups > kMaxGroups) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax.vmap maps over " + std::to_string(groups) + " calls; at most " +
        std::to_string(kMaxGroups) + " are supported"));
  }
  return Shape{groups, rows, width};
}

// Calls `launch(Type<T>, Type<W>, shape)` with the dtypes of the rows and of the weights.
template <class Launch>
ffi::Error dispatch(const Buffer& x, const Buffer& scale, Launch launch) {
  const ffi::ErrorOr<Shape> shape = shape_of(x, scale);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(x.element_type(), [&](auto row_type) {
    using T = typename decltype(row_type)::type;
    if (scale.element_type() == x.element_type()) {
      return to_ffi_error(launch(row_type, row_type, *shape));
    }
    if (scale.element_type() == ffi::F32) {
      return to_ffi_error(launch(row_type, Type<float>{}, *shape));
    }
    return ffi::Error::InvalidArgument("scale has neither the dtype of x nor float32");
  });
}

// Where the rows' statistics go: one without elements is not asked for.
float* statistic(Result& result) { return result->element_count() ? data<float>(result) : nullptr; }

// The gradient along the stream, null for one without elements: nothing comes along it.
template <typename T>
const T* of_stream(const Buffer& dh) {
  return dh.element_count() ? data<T>(dh) : nullptr;
}

int64_t partial_rows(Result& partial) {
  return partial->dimensions()[partial->dimensions().size() - 2];
}

ffi::Error LayerNormForwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer bias, float eps,
                                Result out, Result mean, Result rstd) {
  return dispatch(x, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return LayerNorm<T, W>::forward(stream, data<T>(x), nullptr, nullptr, data<W>(scale),
                                    data<W>(bias), eps, data<T>(out), nullptr, statistic(mean),
                                    statistic(rstd), shape.groups, shape.rows, shape.width);
  });
}

// An x_bias without elements stands for none, here and in the backward.
ffi::Error AddLayerNormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer x_bias,
                                   Buffer scale, Buffer bias, float eps, Result out, Result h,
                                   Result mean, Result rstd) {
  return dispatch(x, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    const W* bias_of_x = x_bias.element_count() ? data<W>(x_bias) : nullptr;
    return LayerNorm<T, W>::forward(stream, data<T>(x), data<T>(residual), bias_of_x,
                                    data<W>(scale), data<W>(bias), eps, data<T>(out), data<T>(h),
                                    statistic(mean), statistic(rstd), shape.groups, shape.rows,
                                    shape.width);
  });
}

ffi::Error LayerNormBackwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer mean,
                                 Buffer rstd, Buffer dout, Result dx, Result dscale, Result dbias,
                                 Result partial) {
  return dispatch(x, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return LayerNorm<T, W>::backward(stream, data<T>(x), data<W>(scale), data<float>(mean),
                                     data<float>(rstd), data<T>(dout), nullptr, data<T>(dx),
                                     data<W>(dscale), data<W>(dbias), nullptr, data<float>(partial),
                                     shape.groups, shape.rows, shape.width, partial_rows(partial));
  });
}

ffi::Error AddLayerNormBackwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Buffer mean,
                                    Buffer rstd, Buffer dout, Buffer dh, Result dx, Result dscale,
                                    Result dbias, Result dx_bias, Result partial) {
  return dispatch(h, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    W* bias_of_x = dx_bias->element_count() ? data<W>(dx_bias) : nullptr;
    return LayerNorm<T, W>::backward(
        stream, data<T>(h), data<W>(scale), data<float>(mean), data<float>(rstd), data<T>(dout),
        of_stream<T>(dh), data<T>(dx), data<W>(dscale), data<W>(dbias), bias_of_x,
        data<float>(partial), shape.groups, shape.rows, shape.width, partial_rows(partial));
  });
}

ffi::Error RmsNormForwardImpl(cudaStream_t stream, Buffer x, Buffer scale, float eps, Result out,
                              Result rstd) {
  return dispatch(x, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return RmsNorm<T, W>::forward(stream, data<T>(x), nullptr, data<W>(scale), eps, data<T>(out),
                                  nullptr, statistic(rstd), shape.groups, shape.rows, shape.width);
  });
}

ffi::Error AddRmsNormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer scale,
                                 float eps, Result out, Result h, Result rstd) {
  return dispatch(x, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return RmsNorm<T, W>::forward(stream, data<T>(x), data<T>(residual), data<W>(scale), eps,
                                  data<T>(out), data<T>(h), statistic(rstd), shape.groups,
                                  shape.rows, shape.width);
  });
}

ffi::Error RmsNormBackwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer rstd,
                               Buffer dout, Result dx, Result dscale, Result partial) {
  return dispatch(x, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return RmsNorm<T, W>::backward(stream, data<T>(x), data<W>(scale), data<float>(rstd),
                                   data<T>(dout), nullptr, data<T>(dx), data<W>(dscale),
                                   data<float>(partial), shape.groups, shape.rows, shape.width,
                                   partial_rows(partial));
  });
}

ffi::Error AddRmsNormBackwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Buffer rstd,
                                  Buffer dout, Buffer dh, Result dx, Result dscale,
                                  Result partial) {
  return dispatch(h, scale, [&](auto row_type, auto weight_type, Shape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    return RmsNorm<T, W>::backward(stream, data<T>(h), data<W>(scale), data<float>(rstd),
                                   data<T>(dout), of_stream<T>(dh), data<T>(dx), data<W>(dscale),
                                   data<float>(partial), shape.groups, shape.rows, shape.width,
                                   partial_rows(partial));
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
