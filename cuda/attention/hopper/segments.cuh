// Segments (packed documents) in the Hopper kernels: which tiles see each other.
#pragma once

#include <climits>

#include "attention/hopper/tile_range.cuh"
#include "common/dependent_launch.cuh"

// For other GPUs the kernels of the forward and backward are empty, and much stays unused.
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#pragma nv_diag_suppress 177
#endif

namespace jaxllm::hopper {

using attention::segment_granules;

struct SegmentParams {
  const int32_t *query_segments, *key_segments;
  const SegmentRange* ranges;
  const TileRange* key_tiles;    // (batch, query tiles): the key tiles that a query tile visits
  const TileRange* query_tiles;  // (batch, key tiles): the query tiles that a key tile visits
};

// The segments of one sequence's queries or keys.
struct SegmentRows {
  const int32_t* ids;
  const SegmentRange* ranges;
  int rows;

  __device__ __forceinline__ int id(int row) const { return __ldg(ids + min(row, rows - 1)); }

  // The segments of kRows rows from `first` on, which may be beyond the last.
  template <int kRows>
  __device__ __forceinline__ SegmentRange range(int first) const {
    SegmentRange all{INT_MAX, INT_MIN};
#pragma unroll
    for (int i = 0; i < kRows; i += int{kSegmentGranule}) {
      const int granule = min((first + i) / int{kSegmentGranule}, segment_granules(rows) - 1);
      all.least = min(all.least, __ldg(&ranges[granule].least));
      all.most = max(all.most, __ldg(&ranges[granule].most));
    }
    return all;
  }
};

template <Rows kRows>
__device__ __forceinline__ SegmentRows segment_rows(const SegmentParams& segments,
                                                    const LocalMask& mask, int sequence) {
  const int64_t ranges = segment_granules(mask.queries) + segment_granules(mask.keys);
  if constexpr (kRows == Rows::kQueries) {
    return {segments.query_segments + int64_t{sequence} * mask.queries,
            segments.ranges + sequence * ranges, mask.queries};
  } else {
    return {segments.key_segments + int64_t{sequence} * mask.keys,
            segments.ranges + sequence * ranges + segment_granules(mask.queries), mask.keys};
  }
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
  const auto lower_bound = [&](auto condition) {
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
  const int begin = lower_bound([&](int tile) {
    const int last = min((tile + 1) * kGranules, segment_granules(rows)) - 1;
    return ranges[last].most >= segments.least;
  });
  const int end =
      lower_bound([&](int tile) { return ranges[tile * kGranules].least > segments.most; });
  return {begin, end};
}

// Fills the arrays of visible tiles; a CTA takes a sequence. Where segments ascend, as those of
// documents one after the other do, a tile is visited if it may share a segment. Then the visited
// tiles are consecutive, and two tiles agree on whether they meet. In any other order the local
// mask alone decides. Either array may be null.
template <int kBlockM, int kBlockN>
__global__ void flash_attention_segment_tiles_kernel(LocalMask local_mask,
                                                     const SegmentRange* ranges,
                                                     TileRange* key_tiles, TileRange* query_tiles) {
  const TiledMask<kBlockM, kBlockN> mask(local_mask);
  const int query_granules = segment_granules(mask.queries);
  const int count = query_granules + segment_granules(mask.keys);
  ranges += int64_t{blockIdx.x} * count;
  const SegmentRange* const key_ranges = ranges + query_granules;

  bool ascends = true;
  for (int i = threadIdx.x + 1; i < count; i += blockDim.x) {
    ascends &= i == query_granules ||
               (ranges[i - 1].least <= ranges[i].least && ranges[i - 1].most <= ranges[i].most);
  }
  ascends = __syncthreads_and(ascends);

  const int tiles_of_queries = key_tiles == nullptr ? 0 : mask.query_tiles();
  for (int tile = threadIdx.x; tile < tiles_of_queries; tile += blockDim.x) {
    TileRange visible = mask.visible_key_tiles(tile);
    if (ascends) {
      const SegmentRange own =
          SegmentRows{nullptr, ranges, mask.queries}.range<kBlockM>(tile * kBlockM);
      visible = intersect(visible, tiles_with<kBlockN>(own, key_ranges, mask.keys));
    }
    key_tiles[int64_t{blockIdx.x} * mask.query_tiles() + tile] = visible;
  }
  if (query_tiles == nullptr) return;
  for (int tile = threadIdx.x; tile < mask.key_tiles(); tile += blockDim.x) {
    TileRange visible = mask.visible_query_tiles(tile);
    if (ascends) {
      const SegmentRange own =
          SegmentRows{nullptr, key_ranges, mask.keys}.range<kBlockN>(tile * kBlockN);
      visible = intersect(visible, tiles_with<kBlockM>(own, ranges, mask.queries));
    }
    query_tiles[int64_t{blockIdx.x} * mask.key_tiles() + tile] = visible;
  }
}

template <int kBlockM, int kBlockN>
cudaError_t launch_segment_tiles(cudaStream_t stream, int64_t batch, const LocalMask& mask,
                                 const SegmentRange* ranges, TileRange* key_tiles,
                                 TileRange* query_tiles) {
  constexpr int kThreads = 256;
  return launch_kernel(stream, flash_attention_segment_tiles_kernel<kBlockM, kBlockN>,
                       {dim3(static_cast<unsigned>(batch)), kThreads}, mask, ranges, key_tiles,
                       query_tiles);
}

}  // namespace jaxllm::hopper
