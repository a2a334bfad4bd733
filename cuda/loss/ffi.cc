// FFI handlers of the loss kernels: check the buffers, switch on the dtype, launch.
#include "common/ffi.h"

#include <limits>

#include "handlers.h"
#include "loss/cross_entropy.h"
#include "loss/head.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

struct Rows {
  int64_t count, width;
};

ffi::ErrorOr<Rows> rows_of(const Buffer& logits, const Buffer& labels) {
  if (logits.dimensions().size() == 0)
    return ffi::Unexpected(ffi::Error::InvalidArgument("logits is a scalar"));
  const int64_t width = logits.dimensions().back();
  // The grid has a block for each row, and columns are counted in 32 bits.
  if (width > std::numeric_limits<int32_t>::max() - 65536)
    return ffi::Unexpected(ffi::Error::InvalidArgument("logits has rows of 2^31 columns"));
  const int64_t count = static_cast<int64_t>(labels.element_count());
  if (count * width != static_cast<int64_t>(logits.element_count()))
    return ffi::Unexpected(ffi::Error::InvalidArgument("labels are not one for each row"));
  if (count > std::numeric_limits<int32_t>::max())
    return ffi::Unexpected(ffi::Error::InvalidArgument("logits has 2^31 rows"));
  return Rows{count, width};
}

// The elements of `array` that belong to each of `parts`: jax.vmap gives both a new leading axis.
int64_t each(int64_t array, const Buffer& parts) {
  return array / std::max<int64_t>(parts.element_count(), 1);
}

// The kernels work in place. XLA gives an operand and the result that is to take its place one
// buffer, but for an operand that is a slice of a larger array, which it reads where it lies.
cudaError_t copy_if_apart(cudaStream_t stream, const Buffer& operand, Result& result) {
  if (operand.untyped_data() == result->untyped_data()) return cudaSuccess;
  return cudaMemcpyAsync(result->untyped_data(), operand.untyped_data(), operand.size_bytes(),
                         cudaMemcpyDeviceToDevice, stream);
}

ffi::Error CrossEntropyForwardImpl(cudaStream_t stream, Buffer logits, Buffer labels,
                                   int64_t ignore_index, float label_smoothing, float z_loss,
                                   int64_t vocab_size, Result losses) {
  const ffi::ErrorOr<Rows> rows = rows_of(logits, labels);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(logits.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        CrossEntropy<T>::forward(stream, data<T>(logits), data<int32_t>(labels),
                                 {ignore_index, label_smoothing, z_loss, vocab_size},
                                 data<float>(losses), rows->count, rows->width));
  });
}

ffi::Error CrossEntropyForwardWithGradientImpl(cudaStream_t stream, Buffer logits, Buffer labels,
                                               Buffer scales, int64_t ignore_index,
                                               float label_smoothing, float z_loss,
                                               int64_t vocab_size, Result dlogits, Result losses) {
  const ffi::ErrorOr<Rows> rows = rows_of(logits, labels);
  if (rows.has_error()) return rows.error();
  if (const cudaError_t status = copy_if_apart(stream, logits, dlogits))
    return to_ffi_error(status);
  return dispatch_floating(logits.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(CrossEntropy<T>::forward_with_gradient(
        stream, data<T>(dlogits), data<int32_t>(labels), data<float>(scales),
        {ignore_index, label_smoothing, z_loss, vocab_size}, data<float>(losses), rows->count,
        rows->width, each(rows->count, scales)));
  });
}

ffi::Error CrossEntropyBackwardImpl(cudaStream_t stream, Buffer dlogits, Buffer dloss,
                                    Result scaled) {
  if (const cudaError_t status = copy_if_apart(stream, dlogits, scaled))
    return to_ffi_error(status);
  const int64_t size = each(static_cast<int64_t>(dlogits.element_count()), dloss);
  return dispatch_floating(dlogits.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(CrossEntropy<T>::backward(stream, data<T>(scaled), data<float>(dloss),
                                                  dloss.element_count(), size));
  });
}

// jax.vmap gives every buffer a new leading axis: so many calls.
ffi::Error HeadExponentialsImpl(cudaStream_t stream, Buffer hidden, Buffer weight, Buffer labels,
                                Buffer scales, bool transpose_weight, int64_t ignore_index,
                                int64_t vocab_size, Result exponentials, Result factors,
                                Result losses, Result sums, Result statistics, Result counts) {
  const auto of_hidden = hidden.dimensions(), of_result = exponentials->dimensions();
  if (of_hidden.size() < 2 || of_result.size() < 2) {
    return ffi::Error::InvalidArgument("hidden or exponentials is not a matrix");
  }
  if (hidden.element_type() != ffi::BF16) {
    return ffi::Error::InvalidArgument("dtype is not bfloat16");
  }
  using T = __nv_bfloat16;
  const HeadSizes sizes{of_hidden[of_hidden.size() - 2], of_hidden.back(), of_result.back()};
  const int64_t rows = sizes.rows, tiles = HeadLoss::sum_tiles(sizes.columns);
  const auto count = [](const Buffer& buffer) { return int64_t(buffer.element_count()); };
  const int64_t calls = count(scales);
  if (count(hidden) != calls * rows * sizes.width || count(labels) != calls * rows ||
      count(weight) != calls * sizes.width * sizes.columns ||
      count(*exponentials) != calls * rows * sizes.columns || count(*factors) != calls * rows ||
      count(*losses) != calls * rows || count(*sums) != calls * tiles * rows ||
      count(*statistics) != calls * 2 * rows || count(*counts) != calls * (2 * rows + 1)) {
    return ffi::Error::InvalidArgument(
        "the shapes of hidden, weight, labels and results do not fit");
  }
  for (int64_t i = 0; i < calls; ++i) {
    const HeadLoss call{data<T>(hidden) + i * rows * sizes.width,
                        data<T>(weight) + i * sizes.width * sizes.columns,
                        transpose_weight,
                        data<int32_t>(labels) + i * rows,
                        data<float>(scales) + i,
                        ignore_index,
                        vocab_size,
                        data<T>(exponentials) + i * rows * sizes.columns,
                        data<float>(factors) + i * rows,
                        data<float>(losses) + i * rows,
                        data<float>(sums) + i * tiles * rows,
                        data<float>(statistics) + i * 2 * rows,
                        data<int32_t>(counts) + i * (2 * rows + 1)};
    const cudaError_t status = call.run(stream, sizes);
    if (status != cudaSuccess) return to_ffi_error(status);
  }
  return ffi::Error::Success();
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossEntropyForward, CrossEntropyForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()  // logits
                                  .Arg<Buffer>()  // labels
                                  .Attr<int64_t>("ignore_index")
                                  .Attr<float>("label_smoothing")
                                  .Attr<float>("z_loss")
                                  .Attr<int64_t>("vocab_size")
                                  .Ret<Buffer>(),  // losses
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossEntropyForwardWithGradient, CrossEntropyForwardWithGradientImpl,
                              stream_binding()
                                  .Arg<Buffer>()  // logits
                                  .Arg<Buffer>()  // labels
                                  .Arg<Buffer>()  // scales
                                  .Attr<int64_t>("ignore_index")
                                  .Attr<float>("label_smoothing")
                                  .Attr<float>("z_loss")
                                  .Attr<int64_t>("vocab_size")
                                  .Ret<Buffer>()   // dlogits, over logits
                                  .Ret<Buffer>(),  // losses
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CrossEntropyBackward, CrossEntropyBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // dlogits
                                  .Arg<Buffer>()   // dloss
                                  .Ret<Buffer>(),  // dlogits * dloss, over dlogits
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(HeadExponentials, HeadExponentialsImpl,
                              stream_binding()
                                  .Arg<Buffer>()  // hidden
                                  .Arg<Buffer>()  // weight
                                  .Arg<Buffer>()  // labels
                                  .Arg<Buffer>()  // scales
                                  .Attr<bool>("transpose_weight")
                                  .Attr<int64_t>("ignore_index")
                                  .Attr<int64_t>("vocab_size")
                                  .Ret<Buffer>()   // exponentials
                                  .Ret<Buffer>()   // factors
                                  .Ret<Buffer>()   // losses
                                  .Ret<Buffer>()   // sums
                                  .Ret<Buffer>()   // statistics
                                  .Ret<Buffer>(),  // counts
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
