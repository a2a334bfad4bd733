// The mask of a consumer warpgroup's scores, 64 rows of an accumulator:
//
//   forward,  Rows::kQueries   s   = q k^T: a row is a query, and columns are keys
//   backward, Rows::kKeys      s^T = k q^T: a row is a key, and columns are queries
//
// A row sees an interval of columns, [first, last]. Under a causal mask one side of it cuts the
// tiles on the diagonal, and the other one matters with a local window alone.
//
// A new mask is one more case here, and, where it hides whole tiles, in TiledMask.
#pragma once

#include <climits>
#include <cmath>

#include "attention/hopper/segments.cuh"
#include "common/wgmma.cuh"

namespace jaxllm::hopper {

// Calls visit(i, column) for the elements of row r, 0 or 1, of a thread's accumulator; columns
// count from the thread's first.
template <int kSize, typename Visit>
__device__ __forceinline__ void for_each_column(int r, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
#pragma unroll
    for (int b = 0; b < 2; ++b) visit(i + 2 * r + b, 2 * i + b);
  }
}

template <Rows kRows, bool kSegments, int kBlockM, int kBlockN>
class ScoreMask {
  static constexpr bool kQueryRows = kRows == Rows::kQueries;

 public:
  __device__ __forceinline__ ScoreMask(const SegmentParams& segments,
                                       const TiledMask<kBlockM, kBlockN>& mask, int sequence,
                                       int first_row)
      : mask_(mask),
        first_row_(first_row),
        unmasked_(kQueryRows ? mask.unmasked_key_tiles(first_row, 64)
                             : mask.unmasked_query_tiles(first_row, 64)),
        row_(kQueryRows ? thread_row() : 0) {
    if constexpr (kSegments) {
      rows_ = segment_rows<kRows>(segments, mask, sequence);
      columns_ = segment_rows<kQueryRows ? Rows::kKeys : Rows::kQueries>(segments, mask, sequence);
      if constexpr (kQueryRows) {
        row_range_ = rows_.range<64>(first_row);
        for (int r = 0; r < 2; ++r) row_segments_[r] = rows_.id(row_ + 8 * r);
      }
    }
  }

  // Whether all 64 rows see all kColumns columns from `first_column` on, in tile `column_tile`.
  template <int kColumns>
  __device__ __forceinline__ bool hides_none(int column_tile, int first_column) const {
    static_assert(kQueryRows);
    if (!unmasked_.contains(column_tile)) return false;
    if constexpr (!kSegments) return true;
    return are_one_segment(row_range_, columns_.range<kColumns>(first_column));
  }

  // Sets the scores that do not count to -inf. The columns begin at `first_column`, in tile
  // `column_tile`.
  template <int kSize>
  __device__ __forceinline__ void apply(float (&s)[kSize], int column_tile,
                                        int first_column) const {
    constexpr int kColumns = 2 * kSize;
    const int row = kQueryRows ? row_ : thread_row();
    const int origin = first_column + accumulator_column(threadIdx.x % kWarpgroup);
    if (!unmasked_.contains(column_tile)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto hide_before = [&](int first) {
          for_each_column<kSize>(r, [&](int i, int column) {
            if (column < first) s[i] = -INFINITY;
          });
        };
        const auto hide_after = [&](int last) {
          for_each_column<kSize>(r, [&](int i, int column) {
            if (column > last) s[i] = -INFINITY;
          });
        };
        if constexpr (kQueryRows) {
          hide_after(min(mask_.last_key(row + 8 * r), mask_.keys - 1) - origin);
          if (first_column >= mask_.first_key(first_row_ + 63)) continue;  // no window begins here
          hide_before(mask_.first_key(row + 8 * r) - origin);
        } else {
          hide_before(row + 8 * r < mask_.keys ? mask_.first_query(row + 8 * r) - origin : INT_MAX);
          if (first_column + kColumns - 1 <= mask_.last_query(first_row_)) continue;
          hide_after(mask_.last_query(row + 8 * r) - origin);
        }
      }
    }
    if constexpr (kSegments) {
      int segments[2];
      // The forward keeps the rows' segments in registers; the backward has none to spare.
      if constexpr (kQueryRows) {
        if (are_one_segment(row_range_, columns_.range<kColumns>(first_column))) return;
        segments[0] = row_segments_[0], segments[1] = row_segments_[1];
      } else {
        if (are_one_segment(columns_.range<kColumns>(first_column), rows_.range<64>(first_row_))) {
          return;
        }
        segments[0] = rows_.id(row), segments[1] = rows_.id(row + 8);
      }
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int segment = columns_.id(origin + 2 * i + b);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (segment != segments[r]) s[i + 2 * r + b] = -INFINITY;
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int thread_row() const {
    return first_row_ + accumulator_row(threadIdx.x % kWarpgroup);
  }

  const TiledMask<kBlockM, kBlockN>& mask_;
  const int first_row_;
  TileRange unmasked_;  // column tiles in which all 64 rows see all columns
  const int row_;
  SegmentRows rows_, columns_;
  SegmentRange row_range_;
  int row_segments_[2];
};

}  // namespace jaxllm::hopper
