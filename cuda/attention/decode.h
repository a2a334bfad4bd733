// Attention of one query of each sequence with a cache of keys and values (split-KV).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// The sizes of a call: out and q are (batch, heads, width), the caches (batch, length, kv_heads,
// width), their scales (batch, length, kv_heads).
struct DecodeSizes {
  int64_t batch, heads, kv_heads, length, width;
  int64_t added = 0;     // tokens that each cache has beyond its `lengths`
  bool overlap = false;  // may start before the end of the kernel before it on the stream
};

// T is the type of q and out, C that of the caches: T, or int8_t with scales.
template <typename T, typename C>
struct CachedAttention {
  // `lengths` has the number of keys of each sequence. `partial` is a workspace of `splits` * batch
  // * heads * (width + 2) floats; it is not used if splits is 1.
  static cudaError_t run(cudaStream_t stream, const T* q, const C* k, const C* v,
                         const float* k_scales, const float* v_scales, const int32_t* lengths,
                         float scale, T* out, float* partial, DecodeSizes sizes, int64_t splits);
};

}  // namespace jaxllm
