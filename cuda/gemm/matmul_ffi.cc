// FFI handlers of the products that are fused with what follows: check the buffers, switch on their
// dtype, launch.
#include "common/ffi.h"
#include "gemm/matmul_hopper.h"
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

ffi::Error MatmulBiasGeluImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias, Result out,
                              Result h) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(x, weight, bias, *out);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  return for_each_call(
      x, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        return MatmulHopper<T>::bias_gelu(
            stream, data<T>(x) + i * rows * width, data<T>(weight) + i * width * columns,
            data<T>(bias) + i * columns, data<T>(h) + i * rows * columns,
            data<T>(out) + i * rows * columns, rows, width, columns);
      });
}

ffi::Error MatmulGeluSlopeImpl(cudaStream_t stream, Buffer dout, Buffer weight, Buffer h,
                               Buffer bias, Result dh, Result dbias, Result partial) {
  const ffi::ErrorOr<Sizes> sizes = sizes_of(dout, weight, bias, h);
  if (sizes.has_error()) return sizes.error();
  const auto [calls, rows, width, columns] = *sizes;
  const int64_t of_partial =
      calls == 0 ? 0 : static_cast<int64_t>(partial->element_count()) / calls;
  return for_each_call(
      dout, calls, [&, rows = rows, width = width, columns = columns](auto type, int64_t i) {
        using T = typename decltype(type)::type;
        return MatmulHopper<T>::gelu_slope(
            stream, data<T>(dout) + i * rows * width, data<T>(weight) + i * width * columns,
            data<T>(h) + i * rows * columns, data<T>(bias) + i * columns,
            data<T>(dh) + i * rows * columns, data<T>(dbias) + i * columns,
            data<float>(partial) + i * of_partial, rows, width, columns);
      });
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulBiasGelu, MatmulBiasGeluImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // bias
                                  .Ret<Buffer>()   // out
                                  .Ret<Buffer>(),  // h
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulGeluSlope, MatmulGeluSlopeImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // dout
                                  .Arg<Buffer>()   // weight
                                  .Arg<Buffer>()   // h
                                  .Arg<Buffer>()   // bias
                                  .Ret<Buffer>()   // dh
                                  .Ret<Buffer>()   // dbias
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
