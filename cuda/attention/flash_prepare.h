// What the kernels of flash attention find written before they begin.
#pragma once

#include "attention/flash_attention.h"

namespace jaxllm::attention {

// Fills options.segment_ranges, if there are segments.
cudaError_t find_segment_ranges(cudaStream_t stream, const FlashShape& shape,
                                const FlashOptions& options);

// delta = the sum over a head's width of out * dout.
template <typename T>
cudaError_t find_delta(cudaStream_t stream, HeadRows<const T> out, HeadRows<const T> dout,
                       const FlashShape& shape, float* delta);

}  // namespace jaxllm::attention
