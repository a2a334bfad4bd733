// FFI handler of matrix-vector products.
#include "common/ffi.h"

#include "gemm/products.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error MatvecImpl(cudaStream_t stream, Buffer w, Buffer x, Result out) {
  return run_products<void>(stream, w, nullptr, 0, x, out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matvec, MatvecImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()   // w
                                  .Arg<Buffer>()   // x
                                  .Ret<Buffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
