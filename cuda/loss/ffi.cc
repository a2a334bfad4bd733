// FFI handlers of the loss kernels: check the buffers, switch on the dtype, launch.
#include "common/ffi.h"

#include <algorithm>
#include <limits>

#include "common/launch.h"
#include "handlers.h"
#include "loss/cross_entropy.h"
#include "loss/lm_head.h"

namespace jaxllm {
namespace {

struct LogitShape {
  int64_t rows, width;
};

// The sizes of a call, after the checks of the buffers that all losses take.
ffi::ErrorOr<LogitShape> logit_shape_of(const Buffer& logits, const Buffer& labels,
                                        const Buffer& losses, int64_t vocab_size) {
  if (logits.dimensions().size() == 0) return ffi::Unexpected(invalid("logits", "is a scalar"));
  const int64_t width = logits.dimensions().back(), rows = count(labels);
  // The grid has a CTA for each row, and columns are counted in 32 bits.
  if (width > std::numeric_limits<int32_t>::max() - 65536)
    return ffi::Unexpected(invalid("logits", "has rows of 2^31 columns"));
  if (rows > std::numeric_limits<int32_t>::max())
    return ffi::Unexpected(invalid("labels", "has more than 2^31 elements"));
  if (rows > 0 && (vocab_size < 1 || vocab_size > width)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "vocab_size is " + std::to_string(vocab_size) + "; 1 to the width of logits, " +
        std::to_string(width) + ", is required"));
  }
  ffi::Error error = check_buffers({
      {"labels", labels, ffi::S32, rows},
      {"losses", losses, ffi::F32, rows},
  });
  if (error.success()) error = check_count(logits, rows * width, "logits");
  if (error.failure()) return ffi::Unexpected(error);
  return LogitShape{rows, width};
}

// The elements of `array` for each element of `parts`: jax.vmap gives both a new leading axis.
ffi::ErrorOr<int64_t> each(const Buffer& array, const char* name, const Buffer& parts,
                           const char* parts_name) {
  ffi::Error error = check_leading_axes(array, name, parts, parts_name);
  if (error.success()) error = check_dtype(parts, ffi::F32, parts_name);
  if (error.failure()) return ffi::Unexpected(error);
  return count(array) / std::max<int64_t>(count(parts), 1);
}

ffi::Error CrossEntropyForwardImpl(cudaStream_t stream, Buffer logits, Buffer labels,
                                   int64_t ignore_index, float label_smoothing, float z_loss,
                                   int64_t vocab_size, Result losses) {
  const ffi::ErrorOr<LogitShape> shape = logit_shape_of(logits, labels, *losses, vocab_size);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(logits, "logits", [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        CrossEntropy<T>::forward(stream, data<T>(logits), data<int32_t>(labels),
                                 {ignore_index, label_smoothing, z_loss, vocab_size},
                                 data<float>(losses), shape->rows, shape->width));
  });
}

ffi::Error CrossEntropyForwardWithGradientImpl(cudaStream_t stream, Buffer logits, Buffer labels,
                                               Buffer scales, int64_t ignore_index,
                                               float label_smoothing, float z_loss,
                                               int64_t vocab_size, Result dlogits, Result losses) {
  const ffi::ErrorOr<LogitShape> shape = logit_shape_of(logits, labels, *losses, vocab_size);
  if (shape.has_error()) return shape.error();
  const ffi::ErrorOr<int64_t> rows_per_scale = each(labels, "labels", scales, "scales");
  if (rows_per_scale.has_error()) return rows_per_scale.error();
  return dispatch_floating(logits, "logits", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"dlogits", *dlogits, dtype_of<T>(), count(logits)}}, [&] {
      JAXLLM_RETURN_IF_ERROR(copy_unless_aliased(stream, logits, dlogits));
      return CrossEntropy<T>::forward_with_gradient(
          stream, data<T>(dlogits), data<int32_t>(labels), data<float>(scales),
          {ignore_index, label_smoothing, z_loss, vocab_size}, data<float>(losses), shape->rows,
          shape->width, *rows_per_scale);
    });
  });
}

ffi::Error CrossEntropyBackwardImpl(cudaStream_t stream, Buffer dlogits, Buffer dloss,
                                    Result scaled) {
  const ffi::ErrorOr<int64_t> size = each(dlogits, "dlogits", dloss, "dloss");
  if (size.has_error()) return size.error();
  return dispatch_floating(dlogits, "dlogits", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"scaled", *scaled, dtype_of<T>(), count(dlogits)}}, [&] {
      JAXLLM_RETURN_IF_ERROR(copy_unless_aliased(stream, dlogits, scaled));
      return CrossEntropy<T>::backward(stream, data<T>(scaled), data<float>(dloss), count(dloss),
                                       *size);
    });
  });
}

// jax.vmap gives every buffer the same new leading axes: their product is the number of calls.
ffi::Error LmHeadSoftmaxImpl(cudaStream_t stream, Buffer hidden, Buffer weight, Buffer labels,
                             Buffer scales, bool transpose_weight, int64_t ignore_index,
                             int64_t vocab_size, Result exponentials, Result factors, Result losses,
                             Result sums, Result statistics, Result counts) {
  const auto of_hidden = hidden.dimensions(), of_weight = weight.dimensions();
  const size_t axes = of_hidden.size();
  if (axes < 2 || of_weight.size() != axes) {
    return invalid("weight", "has not the axes of hidden, or hidden is no matrix");
  }
  using T = __nv_bfloat16;
  const LmHeadSizes sizes{of_hidden[axes - 2], of_hidden[axes - 1],
                          of_weight[axes - (transpose_weight ? 2 : 1)]};
  if (vocab_size < 1 || vocab_size > sizes.columns) {
    return invalid("vocab_size", "is " + std::to_string(vocab_size) + "; weight has " +
                                     std::to_string(sizes.columns) + " columns");
  }
  const int64_t calls = count_matrices(hidden);
  const int64_t rows = sizes.rows, tiles = LmHeadLoss::sum_tiles(sizes.columns);
  const ffi::Error error = check_buffers({
      {"hidden", hidden, ffi::BF16, calls * rows * sizes.width},
      {"weight", weight, ffi::BF16, calls * sizes.width * sizes.columns},
      {"labels", labels, ffi::S32, calls * rows},
      {"scales", scales, ffi::F32, calls},
      {"exponentials", *exponentials, ffi::BF16, calls * rows * sizes.columns},
      {"factors", *factors, ffi::F32, calls * rows},
      {"losses", *losses, ffi::F32, calls * rows},
      {"sums", *sums, ffi::F32, calls * tiles * rows},
      {"statistics", *statistics, ffi::F32, calls * 2 * rows},
      {"counts", *counts, ffi::S32, calls * (2 * rows + 1)},
  });
  if (error.failure()) return error;
  for (int64_t i = 0; i < calls; ++i) {
    const LmHeadLoss call{data<T>(hidden) + i * rows * sizes.width,
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

}  // namespace

JAXLLM_HANDLER(CrossEntropyForward, CrossEntropyForwardImpl, "ignore_index", "label_smoothing",
               "z_loss", "vocab_size");
JAXLLM_HANDLER(CrossEntropyForwardWithGradient, CrossEntropyForwardWithGradientImpl, "ignore_index",
               "label_smoothing", "z_loss", "vocab_size");
JAXLLM_HANDLER(CrossEntropyBackward, CrossEntropyBackwardImpl);
JAXLLM_HANDLER(LmHeadSoftmax, LmHeadSoftmaxImpl, "transpose_weight", "ignore_index", "vocab_size");

}  // namespace jaxllm
