// FFI handlers of the normalization kernels: check the buffers, switch on their dtypes, launch.
#include "common/ffi_rows.h"
#include "handlers.h"
#include "norm/layer_norm.h"
#include "norm/rms_norm.h"

namespace jaxllm {
namespace {

// Groups are the y axis of a grid, three times as many where three weights have gradients.
constexpr int64_t kMaxGroups = kMaxGridYZ / 3;

// Calls `launch(Type<T>, Type<W>, shape)` with the dtypes of the rows and of the weights.
template <class Launch>
ffi::Error dispatch(const Buffer& x, const char* name, const Buffer& scale, Launch launch) {
  const ffi::ErrorOr<RowShape> shape = row_shape_of(x, name, scale, "scale", kMaxGroups);
  if (shape.has_error()) return shape.error();
  if (shape->width == 0) return ffi::Error::Success();
  return dispatch_floating(x, name, [&](auto row_type) {
    if (scale.element_type() == x.element_type()) return launch(row_type, row_type, *shape);
    if (scale.element_type() == ffi::F32) return launch(row_type, Type<float>{}, *shape);
    return invalid("scale", "has dtype " + dtype_name(scale.element_type()) + "; that of " + name +
                                " or float32 is required");
  });
}

// The data of an optional buffer: null for one without elements.
template <typename T>
const T* optional(const Buffer& buffer) {
  return count(buffer) ? data<T>(buffer) : nullptr;
}
template <typename T>
T* optional(Result& buffer) {
  return count(*buffer) ? data<T>(buffer) : nullptr;
}

// The buffers that only layer normalization has: RMS normalization passes no_buffer().
template <template <typename, typename> class Norm>
constexpr Elements kOfLayerNorm =
    Norm<float, float>::kCenters ? Elements::kExactly : Elements::kExactlyOrNone;

// The handlers without the residual addition pass no_buffer() for the buffers that belong to it.
// The statistics, x_bias, dh and dx_bias are optional in any case. `added` says whether residual
// and h are.
template <template <typename, typename> class Norm>
ffi::Error norm_forward(cudaStream_t stream, Buffer x, Buffer residual, Buffer x_bias, Buffer scale,
                        Buffer bias, float eps, Result out, Result h, Result mean, Result rstd,
                        Elements added) {
  return dispatch(x, "x", scale, [&](auto row_type, auto weight_type, RowShape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    const int64_t statistics = Norm<T, W>::kCenters ? count(*mean) : shape.statistics();
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape.elements()},
            {"residual", residual, dtype_of<T>(), shape.elements(), added},
            {"x_bias", x_bias, dtype_of<W>(), shape.weights(), Elements::kExactlyOrNone},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"bias", bias, dtype_of<W>(), shape.weights(), kOfLayerNorm<Norm>},
            {"out", *out, dtype_of<T>(), shape.elements()},
            {"h", *h, dtype_of<T>(), shape.elements(), added},
            {"mean", *mean, ffi::F32, shape.statistics(), Elements::kExactlyOrNone},
            {"rstd", *rstd, ffi::F32, statistics, kOfLayerNorm<Norm>},
        },
        [&] {
          return Norm<T, W>::forward(
              stream, {data<T>(x), data<T>(residual), optional<W>(x_bias), data<W>(scale),
                       data<W>(bias), eps, data<T>(out), data<T>(h), optional<float>(mean),
                       optional<float>(rstd), shape.groups, shape.rows, shape.width});
        });
  });
}

// `name` is that of x in error messages.
template <template <typename, typename> class Norm>
ffi::Error norm_backward(cudaStream_t stream, const char* name, Buffer x, Buffer scale, Buffer mean,
                         Buffer rstd, Buffer dout, Buffer dh, Result dx, Result dscale,
                         Result dbias, Result dx_bias, Result partial) {
  return dispatch(x, name, scale, [&](auto row_type, auto weight_type, RowShape shape) {
    using T = typename decltype(row_type)::type;
    using W = typename decltype(weight_type)::type;
    const int64_t sums = (Norm<T, W>::kCenters ? 2 : 1) + (count(*dx_bias) ? 1 : 0);
    const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(*partial, shape, sums);
    if (partial_rows.has_error()) return partial_rows.error();
    return check_and_launch(
        {
            {name, x, dtype_of<T>(), shape.elements()},
            {"scale", scale, dtype_of<W>(), shape.weights()},
            {"mean", mean, ffi::F32, shape.statistics(), kOfLayerNorm<Norm>},
            {"rstd", rstd, ffi::F32, shape.statistics()},
            {"dout", dout, dtype_of<T>(), shape.elements()},
            {"dh", dh, dtype_of<T>(), shape.elements(), Elements::kExactlyOrNone},
            {"dx", *dx, dtype_of<T>(), shape.elements()},
            {"dscale", *dscale, dtype_of<W>(), shape.weights()},
            {"dbias", *dbias, dtype_of<W>(), shape.weights(), kOfLayerNorm<Norm>},
            {"dx_bias", *dx_bias, dtype_of<W>(), shape.weights(), Elements::kExactlyOrNone},
        },
        [&] {
          return Norm<T, W>::backward(
              stream,
              {data<T>(x), data<W>(scale), data<float>(mean), data<float>(rstd), data<T>(dout),
               optional<T>(dh), data<T>(dx), data<W>(dscale), data<W>(dbias), optional<W>(dx_bias),
               data<float>(partial), shape.groups, shape.rows, shape.width, *partial_rows});
        });
  });
}

ffi::Error LayerNormForwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer bias, float eps,
                                Result out, Result mean, Result rstd) {
  return norm_forward<LayerNorm>(stream, x, no_buffer(), no_buffer(), scale, bias, eps, out,
                                 no_buffer(), mean, rstd, Elements::kExactlyOrNone);
}

ffi::Error AddLayerNormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer x_bias,
                                   Buffer scale, Buffer bias, float eps, Result out, Result h,
                                   Result mean, Result rstd) {
  return norm_forward<LayerNorm>(stream, x, residual, x_bias, scale, bias, eps, out, h, mean, rstd,
                                 Elements::kExactly);
}

ffi::Error LayerNormBackwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer mean,
                                 Buffer rstd, Buffer dout, Result dx, Result dscale, Result dbias,
                                 Result partial) {
  return norm_backward<LayerNorm>(stream, "x", x, scale, mean, rstd, dout, no_buffer(), dx, dscale,
                                  dbias, no_buffer(), partial);
}

ffi::Error AddLayerNormBackwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Buffer mean,
                                    Buffer rstd, Buffer dout, Buffer dh, Result dx, Result dscale,
                                    Result dbias, Result dx_bias, Result partial) {
  return norm_backward<LayerNorm>(stream, "h", h, scale, mean, rstd, dout, dh, dx, dscale, dbias,
                                  dx_bias, partial);
}

ffi::Error RmsNormForwardImpl(cudaStream_t stream, Buffer x, Buffer scale, float eps, Result out,
                              Result rstd) {
  return norm_forward<RmsNorm>(stream, x, no_buffer(), no_buffer(), scale, no_buffer(), eps, out,
                               no_buffer(), no_buffer(), rstd, Elements::kExactlyOrNone);
}

ffi::Error AddRmsNormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer scale,
                                 float eps, Result out, Result h, Result rstd) {
  return norm_forward<RmsNorm>(stream, x, residual, no_buffer(), scale, no_buffer(), eps, out, h,
                               no_buffer(), rstd, Elements::kExactly);
}

ffi::Error RmsNormBackwardImpl(cudaStream_t stream, Buffer x, Buffer scale, Buffer rstd,
                               Buffer dout, Result dx, Result dscale, Result partial) {
  return norm_backward<RmsNorm>(stream, "x", x, scale, no_buffer(), rstd, dout, no_buffer(), dx,
                                dscale, no_buffer(), no_buffer(), partial);
}

ffi::Error AddRmsNormBackwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Buffer rstd,
                                  Buffer dout, Buffer dh, Result dx, Result dscale,
                                  Result partial) {
  return norm_backward<RmsNorm>(stream, "h", h, scale, no_buffer(), rstd, dout, dh, dx, dscale,
                                no_buffer(), no_buffer(), partial);
}

}  // namespace

JAXLLM_HANDLER(LayerNormForward, LayerNormForwardImpl, "eps");
JAXLLM_HANDLER(AddLayerNormForward, AddLayerNormForwardImpl, "eps");
JAXLLM_HANDLER(LayerNormBackward, LayerNormBackwardImpl);
JAXLLM_HANDLER(AddLayerNormBackward, AddLayerNormBackwardImpl);
JAXLLM_HANDLER(RmsNormForward, RmsNormForwardImpl, "eps");
JAXLLM_HANDLER(AddRmsNormForward, AddRmsNormForwardImpl, "eps");
JAXLLM_HANDLER(RmsNormBackward, RmsNormBackwardImpl);
JAXLLM_HANDLER(AddRmsNormBackward, AddRmsNormBackwardImpl);

}  // namespace jaxllm
