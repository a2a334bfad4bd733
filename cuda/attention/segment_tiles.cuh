// Segments (packed documents) on the tiles of the Hopper kernels: which tiles see each other, and
// where single elements are hidden.
#pragma once

#include <climits>

#include "attention/band.cuh"
#include "attention/flash_attention_hopper.h"
#include "common/dependent_launch.cuh"

namespace jaxllm {

// The segments of a call. `of_queries` and `of_keys` say which tiles of the other kind the tiles of
// a sequence visit.
struct Segments {
  const int32_t *queries, *keys;
  const SegmentRange* ranges;
  const TileRange *of_queries, *of_keys;
};

__host__ __device__ __forceinline__ int granules(int rows) {
  return (rows + int{kSegmentGranule} - 1) / int{kSegmentGranule};
}

// The segments of one sequence's queries or keys.
struct SegmentRows {
  const int32_t* ids;
  const SegmentRange* ranges;
  int rows;

  __device__ __forceinline__ int id(int row) const { return __ldg(ids + min(row, rows - 1)); }

  // The segments of kRows rows from `first` on, which may be beyond the last.
  template <int kRows>
  __device__ __forceinline__ SegmentRange of(int first) const {
    SegmentRange all{INT_MAX, INT_MIN};
#pragma unroll
    for (int i = 0; i < kRows; i += int{kSegmentGranule}) {
      const int granule = min((first + i) / int{kSegmentGranule}, granules(rows) - 1);
      all.least = min(all.least, __ldg(&ranges[granule].least));
      all.most = max(all.most, __ldg(&ranges[granule].most));
    }
    return all;
  }
};

__device__ __forceinline__ SegmentRows queries_of_sequence(const Segments& segments,
                                                           const Band& band, int sequence) {
  const int64_t ranges = granules(band.queries) + granules(band.keys);
  return {segments.queries + int64_t{sequence} * band.queries, segments.ranges + sequence * ranges,
          band.queries};
}

__device__ __forceinline__ SegmentRows keys_of_sequence(const Segments& segments, const Band& band,
                                                        int sequence) {
  const int64_t ranges = granules(band.queries) + granules(band.keys);
  return {segments.keys + int64_t{sequence} * band.keys,
          segments.ranges + sequence * ranges + granules(band.queries), band.keys};
}

__device__ __forceinline__ bool are_one_segment(SegmentRange a, SegmentRange b) {
  return a.least == a.most && b.least == b.most && a.least == b.least;
}

// The tiles of kTile rows that may have some of the segments, where ranges ascend.
template <int kTile>
__device__ __forceinline__ TileRange tiles_with(SegmentRange segments, const SegmentRange* ranges,
                                                int rows) {
  constexpr int kGranules = kTile / int{kSegmentGranule};
  const int tiles = (rows + kTile - 1) / kTile;
  const auto first_where = [&](auto condition) {
    int low = 0, high = tiles;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (condition(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  };
  const int begin = first_where([&](int tile) {
    const int last = min((tile + 1) * kGranules, granules(rows)) - 1;
    return ranges[last].most >= segments.least;
  });
  const int end =
      first_where([&](int tile) { return ranges[tile * kGranules].least > segments.most; });
  return {begin, end};
}

__device__ __forceinline__ TileRange intersect(TileRange a, TileRange b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

// Fills the tiles' ranges; a block takes a sequence. Where segments ascend, as those of documents
// one after the other do, a tile is visited if it may have a segment in common: then the tiles that
// one visits are neighbours, and two tiles agree on whether they meet. In any other order the band
// alone decides.
template <int kQueries, int kKeys>
__global__ void tile_ranges_kernel(Band plain_band, const SegmentRange* ranges,
                                   TileRange* of_queries, TileRange* of_keys) {
  const TiledBand<kQueries, kKeys> band(plain_band);
  const int query_granules = granules(band.queries);
  const int count = query_granules + granules(band.keys);
  ranges += int64_t{blockIdx.x} * count;
  const SegmentRange* const key_ranges = ranges + query_granules;

  bool ascends = true;
  for (int i = threadIdx.x + 1; i < count; i += blockDim.x) {
    ascends &= i == query_granules ||
               (ranges[i - 1].least <= ranges[i].least && ranges[i - 1].most <= ranges[i].most);
  }
  ascends = __syncthreads_and(ascends);

  for (int tile = threadIdx.x; tile < band.query_tiles(); tile += blockDim.x) {
    TileRange keys = band.keys_of(tile);
    if (ascends) {
      const SegmentRange own =
          SegmentRows{nullptr, ranges, band.queries}.of<kQueries>(tile * kQueries);
      keys = intersect(keys, tiles_with<kKeys>(own, key_ranges, band.keys));
    }
    of_queries[int64_t{blockIdx.x} * band.query_tiles() + tile] = keys;
  }
  if (of_keys == nullptr) return;
  for (int tile = threadIdx.x; tile < band.key_tiles(); tile += blockDim.x) {
    TileRange queries = band.queries_of(tile);
    if (ascends) {
      const SegmentRange own = SegmentRows{nullptr, key_ranges, band.keys}.of<kKeys>(tile * kKeys);
      queries = intersect(queries, tiles_with<kQueries>(own, ranges, band.queries));
    }
    of_keys[int64_t{blockIdx.x} * band.key_tiles() + tile] = queries;
  }
}

// `of_keys` may be null.
template <int kQueries, int kKeys>
cudaError_t find_tile_ranges(cudaStream_t stream, const HopperAttention& attention,
                             const Band& band, TileRange* of_queries, TileRange* of_keys) {
  constexpr int kThreads = 256;
  return launch_kernel(stream, tile_ranges_kernel<kQueries, kKeys>,
                       {dim3(static_cast<unsigned>(attention.batch)), kThreads}, band,
                       attention.segment_ranges, of_queries, of_keys);
}

}  // namespace jaxllm
