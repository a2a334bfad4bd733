// Which tiles of queries and of keys see each other.
#pragma once

#include "attention/flash_attention_hopper.h"

namespace jaxllm {

// Tiles from `begin` up to, but not with, `end`.
struct TileRange {
  int begin, end;

  __host__ __device__ int size() const { return end > begin ? end - begin : 0; }
  __host__ __device__ bool contains(int tile) const { return begin <= tile && tile < end; }
};

// The mask of a call: query t sees the keys first_key(t) <= s <= last_key(t), and 0 <= s < keys.
// Every sum stays within an int: there are less than 2^29 tokens, and the bounds are clamped.
struct Band {
  int queries, keys, left, right;

  __host__ __device__ int first_key(int query) const { return query + keys - queries - left; }
  __host__ __device__ int last_key(int query) const { return query + keys - queries + right; }
  __host__ __device__ int first_query(int key) const { return key - keys + queries - right; }
  __host__ __device__ int last_query(int key) const { return key - keys + queries + left; }
};

// A band cut into tiles of kQueries by kKeys. A tile of queries and one of keys touch where the
// last query's last key is not before the first key, nor the first query's first key behind the
// last key. Both ranges below follow from this one rule: so a backward pass that walks over the
// keys' tiles and one that waits for them agree.
template <int kQueries, int kKeys>
struct TiledBand : Band {
  __host__ __device__ explicit TiledBand(const Band& band) : Band(band) {}

  __host__ __device__ int query_tiles() const { return (queries + kQueries - 1) / kQueries; }
  __host__ __device__ int key_tiles() const { return (keys + kKeys - 1) / kKeys; }

  __host__ __device__ TileRange keys_of(int query_tile) const {
    const int first = query_tile * kQueries;
    const int last = (first + kQueries < queries ? first + kQueries : queries) - 1;
    const int low = first_key(first), high = last_key(last);
    if (high < 0 || low >= keys) return {0, 0};
    const int end = high / kKeys + 1;
    return {low > 0 ? low / kKeys : 0, end < key_tiles() ? end : key_tiles()};
  }

  __host__ __device__ TileRange queries_of(int key_tile) const {
    const int first = key_tile * kKeys;
    const int last = (first + kKeys < keys ? first + kKeys : keys) - 1;
    const int low = first_query(first), high = last_query(last);
    if (high < 0 || low >= queries) return {0, 0};
    const int end = high / kQueries + 1;
    return {low > 0 ? low / kQueries : 0, end < query_tiles() ? end : query_tiles()};
  }

  // The tiles of which `count` queries from `query` on see every key.
  __host__ __device__ TileRange whole_keys_of(int query, int count) const {
    const int low = first_key(query + count - 1), high = last_key(query);
    return {low > 0 ? (low + kKeys - 1) / kKeys : 0, (high < keys ? high + 1 : keys) / kKeys};
  }

  // The tiles of which every query sees `count` keys from `key` on. Queries beyond the last one do
  // not matter.
  __host__ __device__ TileRange whole_queries_of(int key, int count) const {
    if (key + count > keys) return {0, 0};
    const int low = first_query(key + count - 1);
    return {low > 0 ? (low + kQueries - 1) / kQueries : 0, (last_query(key) + 1) / kQueries};
  }
};

}  // namespace jaxllm
