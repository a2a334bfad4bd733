// Which tiles a CTA computes, and in which order. A scheduler is a type with
//
//   Params                      what it decides by, made on the host by plan()
//   work(), is_valid()          the present WorkTile
//   advance(count)              goes on to the count-th after it
//   kCooperativeLaunch          whether CTAs wait for one another, so that all must run at once
//
// The producer and the consumers of a CTA each walk the same sequence with a scheduler of their
// own.
#pragma once

#include <algorithm>

#include "common/tile_order.cuh"
#include "gemm/hopper/tile.cuh"
#include "gemm/matmul_call.h"

namespace jaxllm::hopper {

// A cluster takes every gridDim-th tile. Tiles are numbered group by group of `group_m` row tiles,
// and column by column in a group, so that concurrent tiles share operands in the L2 cache.
template <class Tile>
class PersistentScheduler {
 public:
  static constexpr bool kCooperativeLaunch = false;
  struct Params {
    int row_tiles, tiles;  // of clusters
    int group_m, k_blocks;
  };

  // Lowers `clusters`, those that run at once, to those with work.
  static cudaError_t plan(const GemmShape& shape, int group_m, Params* params, int64_t* clusters) {
    const int64_t row_tiles = divide_up(shape.rows, Tile::kBlockM * Tile::kClusterM);
    const int64_t tiles = row_tiles * column_tiles(shape);
    if (tiles >= int64_t{1} << 30) return cudaErrorNotSupported;
    *params = {static_cast<int>(row_tiles), static_cast<int>(tiles), group_m,
               static_cast<int>(divide_up(shape.depth, Tile::kBlockK))};
    *clusters = std::min(tiles, *clusters);
    return cudaSuccess;
  }

  __device__ __forceinline__ PersistentScheduler(const Params& params, int rank)
      : params_(params), rank_(rank), tile_(blockIdx.x / Tile::kCluster) {}

  __device__ __forceinline__ bool is_valid() const { return tile_ < params_.tiles; }

  __device__ __forceinline__ WorkTile work() const {
    const TileCoord at =
        tile_coord(tile_, params_.row_tiles, params_.tiles / params_.row_tiles, params_.group_m);
    return {(at.row * Tile::kClusterM + rank_ % Tile::kClusterM) * Tile::kBlockM,
            (at.column * Tile::kClusterN + rank_ / Tile::kClusterM) * Tile::kBlockN, 0,
            params_.k_blocks};
  }

  __device__ __forceinline__ void advance(int count) {
    tile_ += count * (gridDim.x / Tile::kCluster);
  }

 protected:
  static int64_t column_tiles(const GemmShape& shape) {
    return divide_up(shape.columns, Tile::kBlockN * Tile::kClusterN);
  }

 private:
  const Params& params_;
  const int rank_;
  int tile_;
};

// For epilogues that reduce whole rows across CTAs: all tiles of a row run at the same time, and
// the tiles of a CTA have the same columns.
template <class Tile>
class RowAtOnceScheduler : public PersistentScheduler<Tile> {
  using Base = PersistentScheduler<Tile>;

 public:
  using Base::Base;
  using typename Base::Params;
  // Beside another kernel of a shared GPU some CTAs might find no SM, and others wait for them.
  static constexpr bool kCooperativeLaunch = true;

  static cudaError_t plan(const GemmShape& shape, int /*group_m*/, Params* params,
                          int64_t* clusters) {
    const int64_t of_row = Base::column_tiles(shape);
    if (of_row > *clusters) return cudaErrorNotSupported;
    *clusters -= *clusters % of_row;
    return Base::plan(shape, 1, params, clusters);
  }
};

// For results with fewer tiles than the GPU has SMs, such as weight gradients: the K-blocks of a
// tile are split, and every CTA has about as many. Of four tiles and ten CTAs:
//
//            K-blocks of a tile ->
//   tile 0   [ CTA 0     ][ CTA 4     ][8]      whole units: `units` CTAs for each tile
//   tile 1   [ CTA 1     ][ CTA 5     ][9]      remainders: whole ones to the remaining CTAs, and
//   tile 2   [ CTA 2     ][ CTA 6     ][8]      those of the last tiles, laid end to end, in equal
//   tile 3   [ CTA 3     ][ CTA 7     ][8|9]    pieces
//
// So many CTAs read the same K-blocks at the same time, which the first of them brings into the L2
// cache. The accumulators of a part go to a workspace, and a second kernel adds the parts in a
// fixed order: stream_k.cuh. Two GEMMs of the same depth may be grouped in one launch.
//
// Of more tiles than CTAs there are no whole units: a remainder is a tile. In clusters of CTAs that
// share B, a CTA above is a cluster, and a tile is that of a cluster.
template <class Tile>
class StreamKScheduler {
 public:
  static constexpr bool kCooperativeLaunch = false;
  static constexpr int kProblems = 2;  // at most
  static_assert(Tile::kClusterN == 1);

  struct PartRange {
    int first, count;
  };

  struct Params {
    int tiles;
    int k_blocks;          // of a tile
    int unit;              // K-blocks of a CTA
    int units;             // whole units in each tile, for as many CTAs
    int remainder;         // K-blocks of a tile that are left, fewer than a unit
    int remainder_ctas;    // CTAs for the remainders
    int whole_remainders;  // each of these CTAs has the whole remainder of so many tiles
    int piece;             // K-blocks that it has of the other remainders
    int second_problem;    // its first tile
    int row_tiles[kProblems];

    __host__ __device__ int ctas() const { return tiles * units + remainder_ctas; }
    // The first of the tiles whose remainders are cut into pieces.
    __host__ __device__ int first_cut() const { return remainder_ctas * whole_remainders; }

    // Parts are numbered: units, whole remainders, pieces. Where a piece ends, the next one has
    // another tile, another CTA or both, so no two have the same number.
    __host__ __device__ int unit_part(int tile, int unit) const { return unit * tiles + tile; }
    __host__ __device__ int remainder_part(int tile) const { return tiles * units + tile; }
    __host__ __device__ int piece_part(int tile, int cta) const {
      return remainder_part(tile) + cta;
    }
    __host__ __device__ int parts() const { return tiles * (units + 1) + remainder_ctas; }

    // The parts of a tile's remainder.
    __host__ __device__ PartRange remainder_parts(int tile) const {
      if (tile < first_cut()) return {remainder_part(tile), 1};
      if (remainder == 0) return {remainder_part(tile), 0};
      const int first = (tile - first_cut()) * remainder, last = first + remainder - 1;
      return {piece_part(tile, first / piece), last / piece - first / piece + 1};
    }

    // Of the CTA with this rank in a cluster.
    __device__ __forceinline__ WorkTile origin(int tile, int rank) const {
      const int problem = tile >= second_problem;
      const int in_problem = problem ? tile - second_problem : tile;
      return {(in_problem % row_tiles[problem] * Tile::kClusterM + rank) * Tile::kBlockM,
              in_problem / row_tiles[problem] * Tile::kBlockN, 0, k_blocks, problem};
    }
  };

  static int64_t tiles_of(const GemmShape& shape) {
    return row_tiles_of(shape) * divide_up(shape.columns, Tile::kBlockN);
  }

  // Splits one or two GEMMs among at most `ctas`; cudaErrorNotSupported where there are none, or
  // more tiles than kMaxWaves for each.
  template <int kCount>
  static cudaError_t plan(const GemmShape (&shapes)[kCount], int64_t ctas, Params* params) {
    static_assert(kCount <= kProblems);
    Params& p = *params = {};
    for (int i = 0; i < kCount; ++i) {
      const int64_t tiles = tiles_of(shapes[i]);
      if (p.tiles + tiles > kMaxWaves * ctas) return cudaErrorNotSupported;
      p.row_tiles[i] = static_cast<int>(row_tiles_of(shapes[i]));
      p.tiles += static_cast<int>(tiles);
      if (i == 0) p.second_problem = p.tiles;
    }
    p.k_blocks = static_cast<int>(divide_up(shapes[0].depth, Tile::kBlockK));
    p.units = static_cast<int>(ctas / p.tiles);
    p.unit = static_cast<int>(divide_up(int64_t{p.tiles} * p.k_blocks, ctas));
    // Of few K-blocks a CTA may take more than an equal part.
    p.units = std::min(p.units, static_cast<int>(divide_up(p.k_blocks, p.unit)));
    p.remainder = std::max(0, p.k_blocks - p.units * p.unit);
    if (p.remainder > 0) {
      p.remainder_ctas = static_cast<int>(ctas - p.tiles * p.units);
      p.whole_remainders = std::min(p.unit / p.remainder, p.tiles / p.remainder_ctas);
      p.piece = static_cast<int>(
          divide_up(int64_t{p.tiles - p.first_cut()} * p.remainder, p.remainder_ctas));
    }
    return cudaSuccess;
  }

  __device__ __forceinline__ StreamKScheduler(const Params& params, int rank)
      : p_(params), rank_(rank), cta_(static_cast<int>(index()) - params.tiles * params.units) {}

  __device__ __forceinline__ bool is_valid() const {
    if (cta_ < 0) return done_ == 0;
    return done_ < p_.whole_remainders || piece_begin() < piece_end();
  }

  __device__ __forceinline__ WorkTile work() const {
    if (cta_ < 0) {
      const int tile = index() % p_.tiles, unit = index() / p_.tiles;
      const int first = unit * p_.unit;
      return part(tile, p_.unit_part(tile, unit), first, min(first + p_.unit, p_.k_blocks));
    }
    const int first = p_.units * p_.unit;
    if (done_ < p_.whole_remainders) {
      const int tile = done_ * p_.remainder_ctas + cta_;
      return part(tile, p_.remainder_part(tile), first, p_.k_blocks);
    }
    const int tile = p_.first_cut() + piece_begin() / p_.remainder;
    const int begin = first + piece_begin() % p_.remainder;
    return part(tile, p_.piece_part(tile, cta_), begin, begin + piece_k_blocks());
  }

  __device__ __forceinline__ void advance(int) {
    if (cta_ >= 0 && done_ >= p_.whole_remainders) in_piece_ += piece_k_blocks();
    ++done_;
  }

 private:
  static constexpr int64_t kMaxWaves = 16;  // a unit has fewer than 2^31 K-blocks

  static int64_t row_tiles_of(const GemmShape& shape) {
    return divide_up(shape.rows, Tile::kBlockM * Tile::kClusterM);
  }

  __device__ __forceinline__ static unsigned index() { return blockIdx.x / Tile::kCluster; }
  __device__ __forceinline__ int piece_begin() const { return cta_ * p_.piece + in_piece_; }
  __device__ __forceinline__ int piece_end() const {
    return min((cta_ + 1) * p_.piece, (p_.tiles - p_.first_cut()) * p_.remainder);
  }
  // Of the tile that the piece has come to.
  __device__ __forceinline__ int piece_k_blocks() const {
    return min(p_.remainder - piece_begin() % p_.remainder, piece_end() - piece_begin());
  }
  __device__ __forceinline__ WorkTile part(int tile, int number, int first, int end) const {
    WorkTile work = p_.origin(tile, rank_);
    work.first_k_block = first;
    work.end_k_block = end;
    work.part = number * Tile::kCluster + rank_;
    return work;
  }

  const Params& p_;
  const int rank_;
  const int cta_;  // of those for the remainders; negative for the others
  int done_ = 0, in_piece_ = 0;
};

}  // namespace jaxllm::hopper
