// FFI handlers of the activation kernels: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include "activation/bias.h"
#include "activation/pointwise.h"
#include "activation/swiglu.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Arrays of one shape: whatever jax.vmap adds to it, they are so many elements.

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

// Rows with a bias. jax.vmap gives every buffer a new leading axis; a bias has no other, so its
// rows count the independent groups.
struct Groups {
  int64_t groups, rows, width;

  int64_t biases() const { return groups * width; }
  int64_t elements() const { return groups * rows * width; }
};

constexpr int64_t kMaxBlocks = 65535;  // along the y and the z axis of a grid

ffi::ErrorOr<Groups> groups_of(const Buffer& x, const char* name, const Buffer& bias,
                               const char* bias_name) {
  const auto axes = x.dimensions();
  if (axes.size() == 0) return ffi::Unexpected(invalid(name, "is a scalar"));
  const int64_t width = axes.back();
  if (bias.dimensions().size() == 0 || bias.dimensions().back() != width) {
    return ffi::Unexpected(invalid(bias_name, std::string("is not as wide as ") + name));
  }
  if (ffi::Error error = check_leading_axes(x, name, bias, bias_name, 1); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (width == 0) return Groups{0, 0, 0};
  const int64_t groups = count(bias) / width;
  const int64_t rows = groups == 0 ? 0 : count(x) / width / groups;
  if (groups > kMaxBlocks) {  // the z axis
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax.vmap maps over " + std::to_string(groups) + " calls; at most 65535 are supported"));
  }
  return Groups{groups, rows, width};
}

// The rows of the workspace `partial`, (groups, rows, width).
ffi::ErrorOr<int64_t> partial_rows_of(Result& partial, const Groups& size) {
  const auto axes = partial->dimensions();
  if (axes.size() < 2) return ffi::Unexpected(invalid("partial", "has fewer than two axes"));
  const int64_t rows = axes[axes.size() - 2];
  if (rows > kMaxBlocks || (rows == 0 && size.rows > 0)) {  // the y axis
    return ffi::Unexpected(
        invalid("partial", "has " + std::to_string(rows) + " rows; 1 to 65535 are required"));
  }
  ffi::Error error = check_buffer({"partial", *partial, ffi::F32, size.groups * rows * size.width});
  if (error.failure()) return ffi::Unexpected(error);
  return rows;
}

template <template <typename> class Function>
ffi::Error BiasForwardImpl(cudaStream_t stream, Buffer x, Buffer bias, Result out) {
  const ffi::ErrorOr<Groups> size = groups_of(x, "x", bias, "bias");
  if (size.has_error()) return size.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), size->elements()},
            {"bias", bias, dtype_of<T>(), size->biases()},
            {"out", *out, dtype_of<T>(), size->elements()},
        },
        [&] {
          return Function<T>::forward(stream, data<T>(x), data<T>(bias), data<T>(out), size->groups,
                                      size->rows, size->width);
        });
  });
}

ffi::Error BiasAddBackwardImpl(cudaStream_t stream, Buffer dout, Result dbias, Result partial) {
  const ffi::ErrorOr<Groups> size = groups_of(dout, "dout", *dbias, "dbias");
  if (size.has_error()) return size.error();
  const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(partial, *size);
  if (partial_rows.has_error()) return partial_rows.error();
  return dispatch_floating(dout, "dout", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"dout", dout, dtype_of<T>(), size->elements()},
            {"dbias", *dbias, dtype_of<T>(), size->biases()},
        },
        [&] {
          return BiasAdd<T>::backward(stream, data<T>(dout), data<T>(dbias), data<float>(partial),
                                      size->groups, size->rows, size->width, *partial_rows);
        });
  });
}

ffi::Error BiasGeluBackwardImpl(cudaStream_t stream, Buffer x, Buffer bias, Buffer dout, Result dx,
                                Result dbias, Result partial) {
  const ffi::ErrorOr<Groups> size = groups_of(x, "x", bias, "bias");
  if (size.has_error()) return size.error();
  const ffi::ErrorOr<int64_t> partial_rows = partial_rows_of(partial, *size);
  if (partial_rows.has_error()) return partial_rows.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"x", x, dtype_of<T>(), size->elements()},
            {"bias", bias, dtype_of<T>(), size->biases()},
            {"dout", dout, dtype_of<T>(), size->elements()},
            {"dx", *dx, dtype_of<T>(), size->elements()},
            {"dbias", *dbias, dtype_of<T>(), size->biases()},
        },
        [&] {
          return BiasGelu<T>::backward(stream, data<T>(x), data<T>(bias), data<T>(dout),
                                       data<T>(dx), data<T>(dbias), data<float>(partial),
                                       size->groups, size->rows, size->width, *partial_rows);
        });
  });
}

// swiglu: two arrays of one shape are one long row; the halves of the rows of one array are not.

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

// An array of pairs of halves.
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

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

// x in; out out.
auto forward_binding() { return stream_binding().Arg<Buffer>().Ret<Buffer>(); }
// x and a second array (dout, y, bias or up) in; dx or out out.
auto two_argument_binding() { return stream_binding().Arg<Buffer>().Arg<Buffer>().Ret<Buffer>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GeluForward, ForwardImpl<Gelu>, forward_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GeluBackward, BackwardImpl<Gelu>, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReluForward, ForwardImpl<Relu>, forward_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReluBackward, BackwardImpl<Relu>, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidForward, ForwardImpl<Sigmoid>, forward_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SigmoidBackward, BackwardImpl<Sigmoid>, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AddForward, AddForwardImpl, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(BiasAddForward, BiasForwardImpl<BiasAdd>, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(BiasGeluForward, BiasForwardImpl<BiasGelu>, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SwigluForward, SwigluForwardImpl, two_argument_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SwigluPackedForward, SwigluPackedForwardImpl, forward_binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(SwigluPackedBackward, SwigluPackedBackwardImpl,
                              two_argument_binding(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(BiasAddBackward, BiasAddBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // dout
                                  .Ret<Buffer>()   // dbias
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(BiasGeluBackward, BiasGeluBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // bias
                                  .Arg<Buffer>()   // dout
                                  .Ret<Buffer>()   // dx
                                  .Ret<Buffer>()   // dbias
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SwigluBackward, SwigluBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // gate
                                  .Arg<Buffer>()   // up
                                  .Arg<Buffer>()   // dout
                                  .Ret<Buffer>()   // dgate
                                  .Ret<Buffer>(),  // dup
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
