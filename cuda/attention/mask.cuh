// Which keys a query sees: a local (sliding) window around its position, and its own segment. The
// kernels for Hopper apply the mask in attention/hopper/mask.cuh.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/flash_attention.h"
#include "common/reduce.cuh"

namespace jaxllm::attention {

// What the rows of a tile of scores are. The columns are the others.
enum class Rows { kQueries, kKeys };

// Query t sees the keys first_key(t) <= s <= last_key(t), and 0 <= s < keys. Every sum fits an int:
// there are less than 2^29 tokens, and left and right are clamped.
struct LocalMask {
  int queries, keys, left, right;

  __host__ __device__ int first_key(int query) const { return query + keys - queries - left; }
  __host__ __device__ int last_key(int query) const { return query + keys - queries + right; }
  __host__ __device__ int first_query(int key) const { return key - keys + queries - right; }
  __host__ __device__ int last_query(int key) const { return key - keys + queries + left; }
};

inline LocalMask make_local_mask(const FlashShape& shape, const FlashOptions& options) {
  const int64_t all = shape.queries + shape.keys;  // no two positions lie further apart
  const auto side = [all](int64_t given) {
    return static_cast<int>(given < 0 ? all : std::min(given, all));
  };
  return {static_cast<int>(shape.queries), static_cast<int>(shape.keys), side(options.left),
          side(options.right)};
}

__host__ __device__ __forceinline__ int segment_granules(int rows) {
  return (rows + int{kSegmentGranule} - 1) / int{kSegmentGranule};
}

// The mask of the portable kernels.
struct Mask {
  // Query t sees the keys from t + offset - left to t + offset + right.
  int queries, keys;
  int offset, left, right;
  // The segments, null where there is one; `ranges` has those of the queries, then of the keys.
  const int32_t *query_segments, *key_segments;
  const SegmentRange* ranges;

  // The same for sequence b alone.
  __device__ Mask of_sequence(int b) const {
    Mask mask = *this;
    if (ranges != nullptr) {
      mask.query_segments += int64_t{b} * queries;
      mask.key_segments += int64_t{b} * keys;
      mask.ranges += int64_t{b} * (query_granules() + key_granules());
    }
    return mask;
  }

  __device__ int query_granules() const { return segment_granules(queries); }
  __device__ int key_granules() const { return segment_granules(keys); }

  __device__ bool in_window(int query, int key) const {
    const int distance = query + offset - key;
    return distance <= left && -distance <= right;
  }
};

inline Mask make_mask(const FlashShape& shape, const FlashOptions& options) {
  const LocalMask local = make_local_mask(shape, options);
  return {local.queries,
          local.keys,
          local.keys - local.queries,
          local.left,
          local.right,
          options.query_segments,
          options.key_segments,
          options.query_segments == nullptr ? nullptr : options.segment_ranges};
}

struct Interval {
  int first, end;
};

// The rows that some of the rows of a tile, first <= row < end, may see.
template <Rows kOwn>
__device__ Interval visible_rows(const Mask& mask, int first, int end) {
  if constexpr (kOwn == Rows::kQueries) {
    return {max(0, first + mask.offset - mask.left),
            min(mask.keys, end + mask.offset + mask.right)};
  } else {
    return {max(0, first - mask.offset - mask.right),
            min(mask.queries, end - mask.offset + mask.left)};
  }
}

__device__ inline SegmentRange unite(SegmentRange a, SegmentRange b) {
  return {min(a.least, b.least), max(a.most, b.most)};
}

// The segments of the kTile rows from `first` on.
template <int kTile>
__device__ SegmentRange segments_of_tile(const SegmentRange* ranges, int granules, int first) {
  constexpr int kGranule = int{kSegmentGranule};
  constexpr int kCount = (kTile + kGranule - 1) / kGranule;  // 1 for a part of a granule
  SegmentRange range = ranges[first / kGranule];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    range = unite(range, ranges[min(first / kGranule + i, granules - 1)]);
  }
  return range;
}

// The tiles of kTile rows that a CTA with kOwnTile rows visits, in order.
template <Rows kOwn, int kOwnTile, int kTile>
class VisibleTiles {
 public:
  __device__ VisibleTiles(const Mask& mask, int first_row) {
    const int rows = kOwn == Rows::kQueries ? mask.queries : mask.keys;
    const Interval seen = visible_rows<kOwn>(mask, first_row, min(first_row + kOwnTile, rows));
    first_ = seen.first / kTile;
    end_ = seen.first < seen.end ? (seen.end + kTile - 1) / kTile : first_;
    if (mask.ranges == nullptr) return;
    const SegmentRange* of_keys = mask.ranges + mask.query_granules();
    others_ = kOwn == Rows::kQueries ? of_keys : mask.ranges;
    granules_ = kOwn == Rows::kQueries ? mask.key_granules() : mask.query_granules();
    own_ = segments_of_tile<kOwnTile>(
        kOwn == Rows::kQueries ? mask.ranges : of_keys,
        kOwn == Rows::kQueries ? mask.query_granules() : mask.key_granules(), first_row);
  }

  __device__ int first() const { return next(first_); }
  __device__ int end() const { return end_; }

  // The first tile from `tile` on whose segments may be those of the CTA; end() if there is none.
  // A whole warp calls: each lane looks at a tile.
  __device__ int next(int tile) const {
    if (others_ == nullptr) return min(tile, end_);
    for (; tile < end_; tile += 32) {
      const int mine = tile + static_cast<int>(threadIdx.x % 32);
      bool may_see = false;
      if (mine < end_) may_see = shares_segments(mine);
      const unsigned found = __ballot_sync(kFullWarp, may_see);
      if (found != 0) return tile + __ffs(static_cast<int>(found)) - 1;
    }
    return end_;
  }

  // Whether some row of the CTA may see some row of a tile.
  __device__ bool sees_any(int tile) const {
    return first_ <= tile && tile < end_ && (others_ == nullptr || shares_segments(tile));
  }

  // Whether each row of the CTA, except rows beyond the last query, sees each row of a tile.
  __device__ bool sees_all(const Mask& mask, int first_row, int tile) const {
    const int other = tile * kTile;
    bool all;
    if constexpr (kOwn == Rows::kQueries) {
      all = other + kTile <= mask.keys && mask.in_window(first_row + kOwnTile - 1, other) &&
            mask.in_window(first_row, other + kTile - 1);
    } else {
      all = first_row + kOwnTile <= mask.keys && mask.in_window(other + kTile - 1, first_row) &&
            mask.in_window(other, first_row + kOwnTile - 1);
    }
    if (all && others_ != nullptr) {
      const SegmentRange range = unite(own_, segments_of_tile<kTile>(others_, granules_, other));
      all = range.least == range.most;
    }
    return all;
  }

 private:
  // Whether the ranges of segments of the CTA and of a tile meet.
  __device__ __forceinline__ bool shares_segments(int tile) const {
    const SegmentRange range = segments_of_tile<kTile>(others_, granules_, tile * kTile);
    return range.least <= own_.most && own_.least <= range.most;
  }

  int first_, end_;
  const SegmentRange* others_ = nullptr;
  int granules_ = 0;
  SegmentRange own_ = {};
};

}  // namespace jaxllm::attention
