// FFI handler of the GEMV.
#include "common/ffi.h"

#include "gemm/matvec/matvec_ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

ffi::Error MatvecImpl(cudaStream_t stream, Buffer w, Buffer x, Result out) {
  return run_matvec<void>(stream, w, nullptr, 0, x, out);
}

}  // namespace

JAXLLM_HANDLER(Matvec, MatvecImpl);

}  // namespace jaxllm
