// How often each of the integers 0 to bins - 1 occurs in an array.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// `x` is (groups, size) and `counts` (groups, bins). Elements outside of the bins are not counted.
// The atomics are of integers, so the counts do not depend on their order.
cudaError_t histogram(cudaStream_t stream, const int32_t* x, int32_t* counts, int64_t groups,
                      int64_t size, int64_t bins);

}  // namespace jaxllm
