// The FFI handler of the gradients of two weights: checks the buffers, switches on their dtype,
// launches.
#include <algorithm>

#include "common/ffi.h"
#include "common/launch.h"
#include "gemm/weight_gradients.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// The sides of a weight. jax.vmap gives every buffer the same new leading axes: so many calls.
struct WeightSizes {
  int64_t calls, rows, columns;
};

ffi::ErrorOr<WeightSizes> sizes_of(const Buffer& dweight, const char* name) {
  const auto sizes = dweight.dimensions();
  if (sizes.size() < 2 || count(dweight) == 0) {
    return ffi::Unexpected(invalid(name, "is no matrix, or has no elements"));
  }
  const int64_t rows = sizes[sizes.size() - 2], columns = sizes.back();
  return WeightSizes{count(dweight) / (rows * columns), rows, columns};
}

int64_t tiles_of(const WeightSizes& sizes) {
  return divide_up(sizes.rows, kGradientTileRows) * divide_up(sizes.columns, kGradientTileColumns);
}

// `partial` has the tiles, and a tile for each of as many blocks as may run.
ffi::Error WeightGradientsImpl(cudaStream_t stream, Buffer x0, Buffer dout0, Buffer x1,
                               Buffer dout1, Result dweight0, Result dweight1, Result partial) {
  const ffi::ErrorOr<WeightSizes> first = sizes_of(*dweight0, "dweight0");
  if (first.has_error()) return first.error();
  const ffi::ErrorOr<WeightSizes> second = sizes_of(*dweight1, "dweight1");
  if (second.has_error()) return second.error();
  const auto [calls, rows0, columns0] = *first;
  const auto [calls1, rows1, columns1] = *second;
  const int64_t tokens = count(x0) / (calls * rows0);
  constexpr int64_t kTile = kGradientTileRows * kGradientTileColumns;
  const int64_t of_partial =
      std::max(count(*partial) / (calls * kTile), 2 * (tiles_of(*first) + tiles_of(*second))) *
      kTile;
  const ffi::DataType dtype = x0.element_type();
  const ffi::Error error = check_buffers({
      {"x0", x0, dtype, calls * tokens * rows0},
      {"dout0", dout0, dtype, calls * tokens * columns0},
      {"x1", x1, dtype, calls * tokens * rows1},
      {"dout1", dout1, dtype, calls * tokens * columns1},
      {"dweight0", *dweight0, dtype, calls * rows0 * columns0},
      {"dweight1", *dweight1, dtype, calls * rows1 * columns1},
      {"partial", *partial, ffi::F32, calls * of_partial},
  });
  if (error.failure()) return error;
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
      return invalid(
          "x0", "has dtype " + dtype_name(x0.element_type()) + "; bfloat16 or float16 is required");
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
