// FFI handlers of the activation kernels: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include <utility>

#include "activation/bias.h"
#include "activation/pointwise.h"
#include "activation/swiglu.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Calls `launch(Type<T>)`, which returns a CUDA status, with the dtype of x.
template <class Launch>
ffi::Error dispatch(const Buffer& x, Launch launch) {
  return dispatch_floating(x.element_type(), [&](auto type) { return to_ffi_error(launch(type)); });
}

// Arrays of one shape: whatever jax.vmap adds to it, they are so many elements.

template <template <typename> class Function>
ffi::Error ForwardImpl(cudaStream_t stream, Buffer x, Result out) {
  return dispatch(x, [&](auto type) {
    using T = typename decltype(type)::type;
    return Function<T>::forward(stream, data<T>(x), data<T>(out), x.element_count());
  });
}

template <template <typename> class Function>
ffi::Error BackwardImpl(cudaStream_t stream, Buffer x, Buffer dout, Result dx) {
  return dispatch(x, [&](auto type) {
    using T = typename decltype(type)::type;
    return Function<T>::backward(stream, data<T>(x), data<T>(dout), data<T>(dx), x.element_count());
  });
}

ffi::Error AddForwardImpl(cudaStream_t stream, Buffer x, Buffer y, Result out) {
  return dispatch(x, [&](auto type) {
    using T = typename decltype(type)::type;
    return Add<T>::forward(stream, data<T>(x), data<T>(y), data<T>(out), x.element_count());
  });
}

// Rows with a bias. jax.vmap gives every buffer a new leading axis; a bias has no other, so its
// rows count the independent groups.
struct Groups {
  int64_t groups, rows, width;
};

ffi::ErrorOr<Groups> groups_of(const Buffer& x, int64_t bias_elements) {
  const auto dimensions = x.dimensions();
  if (dimensions.size() == 0) return ffi::Unexpected(ffi::Error::InvalidArgument("x is a scalar"));
  const int64_t width = dimensions.back();
  if (width == 0) return Groups{0, 0, 0};
  const int64_t groups = bias_elements / width;
  const int64_t rows = groups == 0 ? 0 : x.element_count() / width / groups;
  if (groups > 65535) {  // the z axis of a grid
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax.vmap maps over " + std::to_string(groups) + " calls; at most 65535 are supported"));
  }
  return Groups{groups, rows, width};
}

int64_t partial_rows(Result& partial) {
  return partial->dimensions()[partial->dimensions().size() - 2];
}

template <template <typename> class Function>
ffi::Error BiasForwardImpl(cudaStream_t stream, Buffer x, Buffer bias, Result out) {
  const ffi::ErrorOr<Groups> size = groups_of(x, bias.element_count());
  if (size.has_error()) return size.error();
  return dispatch(x, [&](auto type) {
    using T = typename decltype(type)::type;
    return Function<T>::forward(stream, data<T>(x), data<T>(bias), data<T>(out), size->groups,
                                size->rows, size->width);
  });
}

ffi::Error BiasAddBackwardImpl(cudaStream_t stream, Buffer dout, Result dbias, Result partial) {
  const ffi::ErrorOr<Groups> size = groups_of(dout, dbias->element_count());
  if (size.has_error()) return size.error();
  return dispatch(dout, [&](auto type) {
    using T = typename decltype(type)::type;
    return BiasAdd<T>::backward(stream, data<T>(dout), data<T>(dbias), data<float>(partial),
                                size->groups, size->rows, size->width, partial_rows(partial));
  });
}

ffi::Error BiasGeluBackwardImpl(cudaStream_t stream, Buffer x, Buffer bias, Buffer dout, Result dx,
                                Result dbias, Result partial) {
  const ffi::ErrorOr<Groups> size = groups_of(x, bias.element_count());
  if (size.has_error()) return size.error();
  return dispatch(x, [&](auto type) {
    using T = typename decltype(type)::type;
    return BiasGelu<T>::backward(stream, data<T>(x), data<T>(bias), data<T>(dout), data<T>(dx),
                                 data<T>(dbias), data<float>(partial), size->groups, size->rows,
                                 size->width, partial_rows(partial));
  });
}

// swiglu: two arrays of one shape are one long row; the halves of the rows of one array are not.

ffi::Error SwigluForwardImpl(cudaStream_t stream, Buffer gate, Buffer up, Result out) {
  return dispatch(gate, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t size = gate.element_count();
    return Swiglu<T>::forward(stream, data<T>(gate), data<T>(up), data<T>(out), 1, size, size);
  });
}

ffi::Error SwigluBackwardImpl(cudaStream_t stream, Buffer gate, Buffer up, Buffer dout,
                              Result dgate, Result dup) {
  return dispatch(gate, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t size = gate.element_count();
    return Swiglu<T>::backward(stream, data<T>(gate), data<T>(up), data<T>(dout), data<T>(dgate),
                               data<T>(dup), 1, size, size);
  });
}

// The rows of an array of pairs of halves, and the width of a half.
std::pair<int64_t, int64_t> halves_of(const Buffer& x) {
  const auto dimensions = x.dimensions();
  if (x.element_count() == 0 || dimensions.size() == 0) return {0, 0};
  return {x.element_count() / dimensions.back(), dimensions.back() / 2};
}

ffi::Error SwigluPackedForwardImpl(cudaStream_t stream, Buffer x, Result out) {
  const auto [rows, width] = halves_of(x);
  return dispatch(x, [&, rows = rows, width = width](auto type) {
    using T = typename decltype(type)::type;
    return Swiglu<T>::forward(stream, data<T>(x), data<T>(x) + width, data<T>(out), rows, width,
                              2 * width);
  });
}

ffi::Error SwigluPackedBackwardImpl(cudaStream_t stream, Buffer x, Buffer dout, Result dx) {
  const auto [rows, width] = halves_of(x);
  return dispatch(x, [&, rows = rows, width = width](auto type) {
    using T = typename decltype(type)::type;
    return Swiglu<T>::backward(stream, data<T>(x), data<T>(x) + width, data<T>(dout), data<T>(dx),
                               data<T>(dx) + width, rows, width, 2 * width);
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
