// The FFI handler of the gradients of two weights: checks the buffers, switches on their dtype,
// launches.
#include "common/ffi.h"
#include "gemm/weight_gradients.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

int64_t count(const Buffer& buffer) { return static_cast<int64_t>(buffer.element_count()); }

// The sides of a weight. jax.vmap gives every buffer new leading axes: so many calls.
struct WeightSizes {
  int64_t calls, rows, columns;
};

ffi::ErrorOr<WeightSizes> sizes_of(const Buffer& dweight) {
  const auto sizes = dweight.dimensions();
  if (sizes.size() < 2 || count(dweight) == 0) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("a weight is no matrix, or has no elements"));
  }
  const int64_t rows = sizes[sizes.size() - 2], columns = sizes.back();
  return WeightSizes{count(dweight) / (rows * columns), rows, columns};
}

ffi::Error WeightGradientsImpl(cudaStream_t stream, Buffer x0, Buffer dout0, Buffer x1,
                               Buffer dout1, Result dweight0, Result dweight1, Result partial) {
  const ffi::ErrorOr<WeightSizes> first = sizes_of(*dweight0), second = sizes_of(*dweight1);
  if (first.has_error()) return first.error();
  if (second.has_error()) return second.error();
  const auto [calls, rows0, columns0] = *first;
  const auto [calls1, rows1, columns1] = *second;
  const int64_t tokens = count(x0) / (calls * rows0);
  if (calls1 != calls || count(x0) != calls * tokens * rows0 ||
      count(dout0) != calls * tokens * columns0 || count(x1) != calls * tokens * rows1 ||
      count(dout1) != calls * tokens * columns1) {
    return ffi::Error::InvalidArgument("the shapes of the arrays and their gradients do not fit");
  }
  const int64_t of_partial = count(*partial) / calls;
  const auto run = [&, calls = calls, rows0 = rows0, columns0 = columns0, rows1 = rows1,
                    columns1 = columns1](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < calls; ++i) {
      const WeightGradient<T> gradients[2] = {
          {data<T>(x0) + i * tokens * rows0, data<T>(dout0) + i * tokens * columns0,
           data<T>(dweight0) + i * rows0 * columns0, rows0, columns0},
          {data<T>(x1) + i * tokens * rows1, data<T>(dout1) + i * tokens * columns1,
           data<T>(dweight1) + i * rows1 * columns1, rows1, columns1}};
      const cudaError_t status = weight_gradients(
          stream, gradients, tokens, data<float>(partial) + i * of_partial, of_partial);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  };
  switch (x0.element_type()) {
    case ffi::BF16:
      return run(Type<__nv_bfloat16>{});
    case ffi::F16:
      return run(Type<__half>{});
    default:
      return ffi::Error::InvalidArgument("dtype is not bfloat16 or float16");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(WeightGradients, WeightGradientsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()   // x0
                                  .Arg<Buffer>()   // dout0
                                  .Arg<Buffer>()   // x1
                                  .Arg<Buffer>()   // dout1
                                  .Ret<Buffer>()   // dweight0
                                  .Ret<Buffer>()   // dweight1
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
