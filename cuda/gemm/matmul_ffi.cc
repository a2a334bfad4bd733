// The FFI handler of GEMMs: checks the buffers, switches on their dtype, launches.
#include "common/ffi.h"
#include "gemm/matmul.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// jax.vmap gives every buffer the same new leading axes. No bias, and no h, have no elements.
ffi::Error MatmulImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer bias, Result out, Result h,
                      bool transpose_a, bool transpose_b, bool gelu, bool tf32) {
  const auto of_a = a.dimensions(), of_b = b.dimensions();
  const size_t axes = of_a.size();
  if (axes < 2 || of_b.size() != axes) {
    return invalid("b", "has not the axes of a, or a is no matrix");
  }
  const int64_t rows = of_a[axes - (transpose_a ? 1 : 2)];
  const int64_t depth = of_a[axes - (transpose_a ? 2 : 1)];
  const int64_t columns = of_b[axes - (transpose_b ? 2 : 1)];
  if (of_b[axes - (transpose_b ? 1 : 2)] != depth) {
    return invalid("b", "has not the depth of a");
  }
  const int64_t calls = count_matrices(a);
  return dispatch_floating(a, "a", [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr ffi::DataType dtype = dtype_of<T>();
    const bool float32_out = out->element_type() == ffi::F32;
    const ffi::DataType of_result = float32_out ? ffi::F32 : dtype;
    const bool has_bias = count(bias) > 0;
    const int64_t of_out = rows * columns;
    const ffi::Error error = check_buffers({
        {"a", a, dtype, calls * rows * depth},
        {"b", b, dtype, calls * depth * columns},
        {"bias", bias, dtype, has_bias ? calls * columns : 0},
        {"out", *out, of_result, calls * of_out},
        {"h", *h, of_result, gelu ? calls * of_out : 0},
    });
    if (error.failure()) return error;
    const int64_t bytes = float32_out ? 4 : sizeof(T);
    for (int64_t i = 0; i < calls; ++i) {
      const int64_t result = i * of_out * bytes;
      const MatmulCall<T> call{rows,
                               columns,
                               depth,
                               data<T>(a) + i * rows * depth,
                               data<T>(b) + i * depth * columns,
                               transpose_a,
                               transpose_b,
                               has_bias ? data<T>(bias) + i * columns : nullptr,
                               gelu,
                               tf32,
                               float32_out,
                               gelu ? data<char>(h) + result : nullptr,
                               data<char>(out) + result};
      const cudaError_t status = MatrixProduct<T>::run(stream, call);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

}  // namespace

JAXLLM_HANDLER(Matmul, MatmulImpl, "transpose_a", "transpose_b", "gelu", "tf32");

}  // namespace jaxllm
