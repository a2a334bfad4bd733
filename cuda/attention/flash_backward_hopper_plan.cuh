// What a block of the gradient's main kernel has, and in which order it works: the sizes, the
// shared memory, the tiles of keys that it takes and the ranks of its additions to dq.
#pragma once

#include "attention/band.cuh"
#include "attention/hopper_launch.h"
#include "attention/segment_tiles.cuh"
#include "common/pipeline.cuh"
#include "common/tile_order.cuh"
#include "common/wgmma.cuh"

// For other GPUs the kernel is empty, and nothing uses what comes here.
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#pragma nv_diag_suppress 177
#endif

namespace jaxllm::hopper {

template <int kWidth>
struct BackwardShape {
  // Narrow heads leave a fourth warpgroup registers for dq, wide ones do not: see multiply_narrow
  // and multiply_wide.
  static constexpr bool kIsNarrow = kWidth == 64;
  static constexpr int kMultipliers = 2;
  static constexpr int kKeys = kMultipliers * 64;
  // What registers allow.
  static constexpr int kQueries = kIsNarrow ? 128 : 64;
  static constexpr int kSlabs = kWidth / kSwizzleColumns;
  // Buffers of dout, of q, whose next scores are multiplied earlier, and of k and v.
  static constexpr int kStages = 2;
  static constexpr int kQueryStages = kIsNarrow ? 3 : 2;
  static constexpr int kKeyStages = kIsNarrow ? 2 : 1;
  // The copier's warpgroup, the multipliers and, for narrow heads, that of dq. Together the
  // registers that they have when the kernel begins. Those who add and store dq need more than 24,
  // the multipliers of narrow heads more than 192.
  static constexpr int kWarpgroups = 1 + kMultipliers + (kIsNarrow ? 1 : 0);
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kCopierRegisters = kIsNarrow ? 48 : 24;
  static constexpr int kMultiplierRegisters = kIsNarrow ? 200 : 240;
  static constexpr int kDqRegisters = 64;
  static_assert(kCopierRegisters + kMultipliers * kMultiplierRegisters +
                    (kIsNarrow ? kDqRegisters : 0) ==
                kWarpgroups * (kIsNarrow ? 128 : 168));
  static constexpr int kWarps = kMultipliers * 4;
  // What threads read themselves each of them gives back, lest racecheck see a race: it does not
  // follow the others of a warp to the one that arrives for it. That is as fast.
  static constexpr int kReaders = kMultipliers * kWarpgroup;
  // Whether this kernel rounds dq, and so many threads store it, or one that comes after it. On an
  // H200, when those threads rounded it too, that was 4% faster for 384 causal heads of 1024
  // queries, 64 wide; and 14% slower for 32 causal key heads of 4096 tokens, 128 wide, each of four
  // heads.
  static constexpr bool kRoundsDq = kIsNarrow;
  static constexpr int kStorers = 64;
  // Half a tile of dq: 64 queries by 64 columns. Narrow heads have halves of queries, of which ds
  // and dq are handed on one by one, wide ones of columns, handed on together.
  static constexpr int kHalfOfDq = 64 * 64;
  static_assert(kQueries * kWidth == 2 * kHalfOfDq);
  static constexpr int kParts = kIsNarrow ? 2 : 1;
  // The warps that multiply dq and hand it on.
  static constexpr int kDqWarps = kIsNarrow ? 4 : kWarps;
  // Who gives k back: of narrow heads who multiplies dq; of wide ones, as all give v back, the
  // thread of each multiplier that has stored the gradient which went over it.
  static constexpr int kKeyReleases = kIsNarrow ? kDqWarps : kMultipliers;
  // Who is told of a tile: the multipliers, the thread that adds dq, and those that multiply and
  // store it.
  static constexpr int kTileReaders = kReaders + 1 + (kIsNarrow ? kWarpgroup + kStorers : 0);
  // The gradient of a bias has a partial sum of dq for every 64 queries: so many for a tile.
  static constexpr int kSumsOfDq = kQueries / 64;
};

// A tile of keys of one head, and the tiles of queries that see it.
struct BackwardTile {
  int sequence, kv_head, key_tile;
  TileRange queries;

  __device__ __forceinline__ bool is_there() const { return key_tile >= 0; }
};

template <typename T, int kWidth>
struct BackwardShared {
  using Shape = BackwardShape<kWidth>;
  T k[Shape::kKeyStages][Shape::kKeys * kWidth];
  T v[Shape::kKeyStages][Shape::kKeys * kWidth];
  T q[Shape::kQueryStages][Shape::kQueries * kWidth];
  T dout[Shape::kStages][Shape::kQueries * kWidth];
  T ds[Shape::kKeys * Shape::kQueries];
  // What is added to the sum of dq; or, where dq is rounded here and a tile's last part is made,
  // the sum of all others.
  float dq[2][Shape::kHalfOfDq];
  T rounded_dq[Shape::kRoundsDq ? Shape::kQueries * kWidth : 8];
  alignas(16) float lse[Shape::kQueryStages][Shape::kQueries];
  alignas(16) float delta[Shape::kStages][Shape::kQueries];
  Barrier k_full[Shape::kKeyStages], k_empty[Shape::kKeyStages];
  Barrier v_full[Shape::kKeyStages], v_empty[Shape::kKeyStages];
  Barrier q_full[Shape::kQueryStages], q_empty[Shape::kQueryStages];
  Barrier dout_full[Shape::kStages], dout_empty[Shape::kStages];
  Barrier ds_full[Shape::kParts], ds_empty[Shape::kParts];
  Barrier dq_full[Shape::kParts], dq_empty[Shape::kParts], sum_full[Shape::kParts];
  Barrier rounded_full, rounded_empty;
  // The block's tiles, one ahead of those who are at work on the one before.
  Barrier tile_full[2], tile_empty[2];
  BackwardTile tiles[2];
};

struct BackwardArguments {
  Band band;
  int heads, kv_heads;
  float scale;
  // Tiles of keys below `split` are summed from the last to the first, those from it on thereafter
  // and upwards.
  int split;
  float* lse;           // (batch, heads, padded queries), times log2(e); inf where no key is seen
  float* delta;         // the same shape; where it is known, nobody writes it
  float* dq_sums;       // (batch, heads, tiles of queries) of tiles in the order of accumulators
  int* ranks;           // (batch, heads, tiles of queries): how often a tile of dq was added to
  int* tickets;         // the next ticket
  int items;            // as many tickets, one for each tile of keys of each head
  bool from_last;       // the last head of the last sequence has the first of them
  int heads_at_a_time;  // so many have them by turns
  Segments segments;
  // The partial sums of a bias's gradient, or null. Of dq (batch, tiles of queries, kSumsOfDq,
  // heads, width); of dout, of each tile of queries, (batch, tiles of queries, group, kv_heads,
  // width), where the heads of a group are those that share keys.
  float *dq_partial, *dout_partial;
};

// The tiles of queries that a tile of keys visits, and the other way round.
template <bool kSegments, typename Tiles>
__device__ __forceinline__ TileRange queries_seen(const BackwardArguments& a, const Tiles& band,
                                                  int sequence, int key_tile) {
  if constexpr (!kSegments) return band.queries_of(key_tile);
  return a.segments.of_keys[int64_t{sequence} * band.key_tiles() + key_tile];
}
template <bool kSegments, typename Tiles>
__device__ __forceinline__ TileRange keys_seen(const BackwardArguments& a, const Tiles& band,
                                               int sequence, int query_tile) {
  if constexpr (!kSegments) return band.keys_of(query_tile);
  return a.segments.of_queries[int64_t{sequence} * band.query_tiles() + query_tile];
}

// A tile of keys of one head.
struct BackwardItem {
  int sequence, kv_head, key_tile;
};

// The place of a ticket, a head as its row and a step of the head's order as its column, where a
// head has `split` tiles and then others: a group of heads at a time, the first tiles of one head
// after the other, and then the other tiles of all heads by turns.
__host__ __device__ __forceinline__ constexpr TilePlace place_in_halves(int ticket, int heads,
                                                                        int key_tiles, int split,
                                                                        int heads_at_a_time) {
  const int first_of_group = ticket / (heads_at_a_time * key_tiles) * heads_at_a_time;
  const int left = heads - first_of_group;
  const int in_group = left < heads_at_a_time ? left : heads_at_a_time;
  const int rest = ticket - first_of_group * key_tiles;
  if (rest < in_group * split) return {first_of_group + rest / split, rest % split};
  const int others = rest - in_group * split;
  return {first_of_group + others % in_group, split + others / in_group};
}

// Tiles are handed out by ticket, a tile of keys each. Of a head's tiles those below `split` have
// the earlier tickets, the last of them first, and then come those from `split` on, the first of
// them first. That is the order in which they add to dq (see rank_of), so that a tile waits for
// sums of those with earlier tickets only. Of the tickets that are not done a block works on its
// least, so that the least of all waits for nobody: nothing can wait for ever, however few blocks
// run. A block takes the next ticket when it has loaded all of a tile, so that its first loads are
// there when the gradients of the tile before are stored.
//
// Without a split: under a causal mask the tiles start at their own diagonal, the last with the
// fewest queries before it, so that a tile never catches up with one before it. The tiles of
// several heads alternate, so that a block begins one some time after the tile before it, of the
// same head, was begun, and waits less at what that adds: on an H200 384 causal heads of 1024
// queries, 64 wide, take 335 us for 345.
//
// In halves: that leaves the longest tiles to the end of the grid, and with few, long tiles (heads
// that share keys) many multiprocessors idle there. Where the first halves of a group of heads fill
// the grid, the block that is done first, with the shortest tile of a first half, takes the longest
// of a second half, and so on: all blocks have the same to do, and the last tiles to be taken are
// the shortest. A tile of a second half waits for all of the first, which are that far by then.
__device__ __forceinline__ BackwardItem take_item(const BackwardArguments& a, int key_tiles,
                                                  int ticket) {
  const int heads = a.items / key_tiles;
  const TilePlace place =
      a.split < key_tiles ? place_in_halves(ticket, heads, key_tiles, a.split, a.heads_at_a_time)
                          : place_tile(ticket, heads, key_tiles, a.heads_at_a_time);
  const int head = a.from_last ? heads - 1 - place.row : place.row;
  const int key_tile = place.column < a.split ? a.split - 1 - place.column : place.column;
  return {head / a.kv_heads, head % a.kv_heads, key_tile};
}

// Tells kTileReaders of the block's next tile.
template <typename T, int kWidth>
__device__ __forceinline__ void tell_of_tile(BackwardShared<T, kWidth>& shared,
                                             PipelineState<2>& ring, const BackwardTile& tile) {
  shared.tile_empty[ring.stage].wait(ring.phase ^ 1);
  shared.tiles[ring.stage] = tile;
  shared.tile_full[ring.stage].arrive();
  ring.advance();
}

// The block's next tile, for one of them.
template <typename T, int kWidth>
__device__ __forceinline__ BackwardTile read_tile(BackwardShared<T, kWidth>& shared,
                                                  PipelineState<2>& ring) {
  shared.tile_full[ring.stage].wait(ring.phase);
  const BackwardTile tile = shared.tiles[ring.stage];
  shared.tile_empty[ring.stage].arrive();
  ring.advance();
  return tile;
}

// How many additions to a tile of dq come before that of `key_tile`; `seen` is all that add to it.
__host__ __device__ __forceinline__ int rank_of(int key_tile, const TileRange& seen, int split) {
  const int low_end = split < seen.end ? split : seen.end;
  if (key_tile < split) return low_end - 1 - key_tile;
  const int lows = low_end > seen.begin ? low_end - seen.begin : 0;
  return lows + key_tile - (split > seen.begin ? split : seen.begin);
}

// The tile of keys that adds last.
__host__ __device__ __forceinline__ int last_to_add(const TileRange& seen, int split) {
  return seen.end > split ? seen.end - 1 : seen.begin;
}

// What the L2 cache drops at a time. The workspace begins at a multiple of it.
constexpr int kCacheLineBytes = 128;

constexpr int kAllBarrier = 1;    // both multipliers of a wide head are done with a tile of keys
constexpr int kStoreBarrier = 2;  // + multiplier: its gradients are in shared memory

}  // namespace jaxllm::hopper
