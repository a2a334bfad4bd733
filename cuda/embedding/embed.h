// Token and position embeddings.
//
// A call has `groups` independent copies of every array, one after the other (jax.vmap).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

struct EmbedShape {
  int64_t groups, sequences, length;  // tokens: (groups, sequences, length)
  int64_t vocabulary, positions;      // rows of the token and position tables; positions may be 0
  int64_t width;
  // For the backward pass: the buckets of tokens, a power of two, by the last bits of a token; and
  // the most tokens of the vocabulary in a bucket.
  int64_t buckets = 1, slots = 0;

  __host__ __device__ int64_t tokens() const { return sequences * length; }
};

// Places are added up in chunks of this size where all tokens of a chunk are equal.
inline constexpr int64_t kEmbedChunk = 64;

// The first kernels of the backward pass split the tokens into this many tiles, a CTA each.
inline constexpr int kEmbedTiles = 64;

// The most buckets, and slots of a bucket: their counts are in shared memory.
inline constexpr int kEmbedMaxKeys = 1024;

// The intermediate arrays of the backward pass, for each group of the call.
struct EmbedWorkspace {
  int32_t* tile_counts;  // (kEmbedTiles, buckets)
  int32_t* pairs;        // (tokens, 2): (slot, place), sorted by bucket
  int32_t* places;       // (tokens): rows of dout, sorted by token; equal tokens in order
  int32_t* starts;       // (buckets * slots + 1): where the places of a token begin
  float* partial;        // (tokens / kEmbedChunk, width): sums of chunks
};

template <typename T>
struct Embed {
  // out[b, t] = token_table[tokens[b, t]] + position_table[t]; tokens are clamped to the
  // vocabulary. Without positions the table's rows are copied.
  static cudaError_t forward(cudaStream_t stream, const int32_t* tokens, const T* token_table,
                             const T* position_table, T* out, const EmbedShape& shape);

  // dtoken_table[v] is the sum of dout over the places of token v, dposition_table[t] the sum over
  // the sequences of dout[b, t]; every row of both is stored. With `adds` the sums are added to
  // dtoken_table, and rows of tokens without a place keep their contents. The order of the
  // additions depends on the tokens and the shape alone.
  static cudaError_t backward(cudaStream_t stream, const int32_t* tokens, const T* dout,
                              T* dtoken_table, bool adds, T* dposition_table,
                              const EmbedWorkspace& workspace, const EmbedShape& shape);
};

}  // namespace jaxllm
