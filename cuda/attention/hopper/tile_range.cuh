// Which tiles of queries and of keys see each other under a local mask.
#pragma once

#include "attention/mask.cuh"

namespace jaxllm::hopper {

using attention::LocalMask;
using attention::Rows;

// Tiles from `begin` up to, but not with, `end`.
struct TileRange {
  int begin, end;

  __host__ __device__ int size() const { return end > begin ? end - begin : 0; }
  __host__ __device__ bool contains(int tile) const { return begin <= tile && tile < end; }
};

__device__ __forceinline__ TileRange intersect(TileRange a, TileRange b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

// A mask cut into tiles of kBlockM queries by kBlockN keys. A causal local window, for example:
//
//               key tile 0   1    2    3        #  unmasked: every query sees every key
//   query tile 0  [ \  ][    ][    ][    ]      \  visible: some query sees some key
//   query tile 1  [ #  ][ \  ][    ][    ]         (blank tiles are skipped)
//   query tile 2  [ \  ][ #  ][ \  ][    ]
//   query tile 3  [    ][ \  ][ #  ][ \  ]
//
// A tile is visible where the last query's last key is not before the first key, nor the first
// query's first key behind the last key. Both ranges of visible tiles follow from this one rule, so
// the backward's loop over query tiles and its wait for other key tiles agree.
template <int kBlockM, int kBlockN>
struct TiledMask : LocalMask {
  __host__ __device__ explicit TiledMask(const LocalMask& mask) : LocalMask(mask) {}

  __host__ __device__ int query_tiles() const { return (queries + kBlockM - 1) / kBlockM; }
  __host__ __device__ int key_tiles() const { return (keys + kBlockN - 1) / kBlockN; }

  __host__ __device__ TileRange visible_key_tiles(int query_tile) const {
    const int first = query_tile * kBlockM;
    const int last = (first + kBlockM < queries ? first + kBlockM : queries) - 1;
    const int low = first_key(first), high = last_key(last);
    if (high < 0 || low >= keys) return {0, 0};
    const int end = high / kBlockN + 1;
    return {low > 0 ? low / kBlockN : 0, end < key_tiles() ? end : key_tiles()};
  }

  __host__ __device__ TileRange visible_query_tiles(int key_tile) const {
    const int first = key_tile * kBlockN;
    const int last = (first + kBlockN < keys ? first + kBlockN : keys) - 1;
    const int low = first_query(first), high = last_query(last);
    if (high < 0 || low >= queries) return {0, 0};
    const int end = high / kBlockM + 1;
    return {low > 0 ? low / kBlockM : 0, end < query_tiles() ? end : query_tiles()};
  }

  // The key tiles of which `count` queries from `query` on see every key.
  __host__ __device__ TileRange unmasked_key_tiles(int query, int count) const {
    const int low = first_key(query + count - 1), high = last_key(query);
    return {low > 0 ? (low + kBlockN - 1) / kBlockN : 0, (high < keys ? high + 1 : keys) / kBlockN};
  }

  // The query tiles of which every query sees `count` keys from `key` on. Queries beyond the last
  // one do not matter.
  __host__ __device__ TileRange unmasked_query_tiles(int key, int count) const {
    if (key + count > keys) return {0, 0};
    const int low = first_query(key + count - 1);
    return {low > 0 ? (low + kBlockM - 1) / kBlockM : 0, (last_query(key) + 1) / kBlockM};
  }
};

}  // namespace jaxllm::hopper
