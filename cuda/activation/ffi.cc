// FFI handlers of the activation kernels: check the buffers, switch on their dtype, launch.
#include "activation/bias.h"
#include "activation/pointwise.h"
#include "activation/swiglu.h"
#include "common/ffi_rows.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// Elementwise functions of arrays of one shape: jax.vmap only adds elements.

template <template <typename> class Function>
ffi::Error ForwardImpl(cudaStream_t stream, Buffer x, Result out) {
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), count(x)}}, [&] {
      return Function<T>::forward(stream, data<T>(x), data<T>(out), count(x));
    });
  });
}

template <template <typename> class Function>
ffi::Error BackwardImpl(cudaStream_t stream, Buffer x, Buffer dout, Result dx) {
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {{"dout", dout, dtype_of<T>(), count(x)}, {"dx", *dx, dtype_of<T>(), count(x)}}, [&] {
          return Function<T>::backward(stream, data<T>(x), data<T>(dout), data<T>(dx), count(x));
        });
  });
}

ffi::Error AddForwardImpl(cudaStream_t stream, Buffer x, Buffer y, Result out) {
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {{"y", y, dtype_of<T>(), count(x)}, {"out", *out, dtype_of<T>(), count(x)}},
        [&] { return Add<T>::forward(stream, data<T>(x), data<T>(y), data<T>(out), count(x)); });
  });
}

template <template <typename> class Function>
ffi::Error BiasForwardImpl(cudaStream_t stream, Buffer x, Buffer bias, Result out) {
  const ffi::ErrorOr<RowShape> shape = row_shape_of(x, "x", bias, "bias", kMaxGridYZ);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape->elements()},
            {"bias", bias, dtype_of<T>(), shape->weights()},
            {"out", *out, dtype_of<T>(), shape->elements()},
        },
        [&] {
          return Function<T>::forward(stream, data<T>(x), data<T>(bias), data<T>(out),
                                      shape->groups, shape->rows, shape->width);
        });
  });
}

ffi::Error BiasAddBackwardImpl(cudaStream_t stream, Buffer dout, Result dbias, Result partial) {
  const ffi::ErrorOr<RowShape> shape = row_shape_of(dout, "dout", *dbias, "dbias", kMaxGridYZ);
  if (shape.has_error()) return shape.error();
  const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(*partial, *shape, 1);
  if (partial_rows.has_error()) return partial_rows.error();
  return dispatch_floating(dout, "dout", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"dout", dout, dtype_of<T>(), shape->elements()},
            {"dbias", *dbias, dtype_of<T>(), shape->weights()},
        },
        [&] {
          return BiasAdd<T>::backward(stream, data<T>(dout), data<T>(dbias), data<float>(partial),
                                      shape->groups, shape->rows, shape->width, *partial_rows);
        });
  });
}

ffi::Error BiasGeluBackwardImpl(cudaStream_t stream, Buffer x, Buffer bias, Buffer dout, Result dx,
                                Result dbias, Result partial) {
  const ffi::ErrorOr<RowShape> shape = row_shape_of(x, "x", bias, "bias", kMaxGridYZ);
  if (shape.has_error()) return shape.error();
  const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(*partial, *shape, 1);
  if (partial_rows.has_error()) return partial_rows.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), shape->elements()},
            {"bias", bias, dtype_of<T>(), shape->weights()},
            {"dout", dout, dtype_of<T>(), shape->elements()},
            {"dx", *dx, dtype_of<T>(), shape->elements()},
            {"dbias", *dbias, dtype_of<T>(), shape->weights()},
        },
        [&] {
          return BiasGelu<T>::backward(stream, data<T>(x), data<T>(bias), data<T>(dout),
                                       data<T>(dx), data<T>(dbias), data<float>(partial),
                                       shape->groups, shape->rows, shape->width, *partial_rows);
        });
  });
}

// swiglu: two arrays of one shape count as one row each; the halves of a packed array's rows do
// not.

ffi::Error SwigluForwardImpl(cudaStream_t stream, Buffer gate, Buffer up, Result out) {
  return dispatch_floating(gate, "gate", [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t size = count(gate);
    return check_and_launch({{"up", up, dtype_of<T>(), size}, {"out", *out, dtype_of<T>(), size}},
                            [&] {
                              return Swiglu<T>::forward(stream, data<T>(gate), data<T>(up),
                                                        data<T>(out), 1, size, size);
                            });
  });
}

ffi::Error SwigluBackwardImpl(cudaStream_t stream, Buffer gate, Buffer up, Buffer dout,
                              Result dgate, Result dup) {
  return dispatch_floating(gate, "gate", [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t size = count(gate);
    return check_and_launch(
        {
            {"up", up, dtype_of<T>(), size},
            {"dout", dout, dtype_of<T>(), size},
            {"dgate", *dgate, dtype_of<T>(), size},
            {"dup", *dup, dtype_of<T>(), size},
        },
        [&] {
          return Swiglu<T>::backward(stream, data<T>(gate), data<T>(up), data<T>(dout),
                                     data<T>(dgate), data<T>(dup), 1, size, size);
        });
  });
}

// The gate and up halves of the rows of a packed array.
struct Halves {
  int64_t rows, width;  // of a half
};

ffi::ErrorOr<Halves> halves_of(const Buffer& x) {
  const auto axes = x.dimensions();
  if (axes.size() == 0 || axes.back() % 2 != 0) {
    return ffi::Unexpected(invalid("x", "has no last axis of an even number of columns"));
  }
  if (count(x) == 0) return Halves{0, 0};
  return Halves{count(x) / axes.back(), axes.back() / 2};
}

ffi::Error SwigluPackedForwardImpl(cudaStream_t stream, Buffer x, Result out) {
  const ffi::ErrorOr<Halves> halves = halves_of(x);
  if (halves.has_error()) return halves.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), count(x) / 2}}, [&] {
      return Swiglu<T>::forward(stream, data<T>(x), data<T>(x) + halves->width, data<T>(out),
                                halves->rows, halves->width, 2 * halves->width);
    });
  });
}

ffi::Error SwigluPackedBackwardImpl(cudaStream_t stream, Buffer x, Buffer dout, Result dx) {
  const ffi::ErrorOr<Halves> halves = halves_of(x);
  if (halves.has_error()) return halves.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {{"dout", dout, dtype_of<T>(), count(x) / 2}, {"dx", *dx, dtype_of<T>(), count(x)}}, [&] {
          return Swiglu<T>::backward(stream, data<T>(x), data<T>(x) + halves->width, data<T>(dout),
                                     data<T>(dx), data<T>(dx) + halves->width, halves->rows,
                                     halves->width, 2 * halves->width);
        });
  });
}

}  // namespace

JAXLLM_HANDLER(GeluForward, ForwardImpl<Gelu>);
JAXLLM_HANDLER(GeluBackward, BackwardImpl<Gelu>);
JAXLLM_HANDLER(ReluForward, ForwardImpl<Relu>);
JAXLLM_HANDLER(ReluBackward, BackwardImpl<Relu>);
JAXLLM_HANDLER(SigmoidForward, ForwardImpl<Sigmoid>);
JAXLLM_HANDLER(SigmoidBackward, BackwardImpl<Sigmoid>);
JAXLLM_HANDLER(AddForward, AddForwardImpl);
JAXLLM_HANDLER(BiasAddForward, BiasForwardImpl<BiasAdd>);
JAXLLM_HANDLER(BiasGeluForward, BiasForwardImpl<BiasGelu>);
JAXLLM_HANDLER(SwigluForward, SwigluForwardImpl);
JAXLLM_HANDLER(SwigluPackedForward, SwigluPackedForwardImpl);
JAXLLM_HANDLER(SwigluPackedBackward, SwigluPackedBackwardImpl);
JAXLLM_HANDLER(BiasAddBackward, BiasAddBackwardImpl);
JAXLLM_HANDLER(BiasGeluBackward, BiasGeluBackwardImpl);
JAXLLM_HANDLER(SwigluBackward, SwigluBackwardImpl);

}  // namespace jaxllm
