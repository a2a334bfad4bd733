// Which tiles a CTA works on, and in which order. Both kernels are persistent: a CTA an SM, which
// takes tiles from a counter in global memory until there are none.
#pragma once

#include "attention/hopper/backward_traits.cuh"
#include "attention/hopper/forward_traits.cuh"
#include "common/tile_order.cuh"

namespace jaxllm::hopper {

// The forward's dynamic persistent scheduler, for the producer thread, which hands each work tile
// to the consumers beside Q. The kernel for dq has it too.
//
// The tiles with most keys come first, so that the last to be taken are short. Only so many heads
// alternate as have K and V in the L2 cache together. The heads of the last sequences come first:
// the GEMM that wrote them has most likely left them there. Heads that share keys are neighbours.
template <class Params>
class ForwardTileScheduler {
 public:
  __device__ __forceinline__ explicit ForwardTileScheduler(const Params& params)
      : params_(params), tile_(blockIdx.x) {}

  __device__ __forceinline__ bool is_valid() const { return tile_ < params_.tiles; }
  // Asks for the next tile, long before it is needed.
  __device__ __forceinline__ void prefetch_next() {
    next_ = gridDim.x + atomicAdd(params_.tile_counter, 1);
  }
  __device__ __forceinline__ void advance() { tile_ = next_; }

  __device__ __forceinline__ ForwardWorkTile work() const {
    const int heads = params_.batch * params_.heads;
    const TileCoord coord = tile_coord(tile_, heads, params_.query_tiles, params_.heads_at_a_time);
    const int head = heads - 1 - coord.row;
    return {params_.query_tiles - 1 - coord.column, head % params_.heads, head / params_.heads};
  }

 private:
  const Params& params_;
  int tile_, next_;
};

// The producer's part of the forward and of the kernel for dq: loads work tiles until there are
// none.
template <bool kSegments, class Producer, class Params, class Mask>
__device__ __forceinline__ void produce_query_tiles(Producer& producer, const Params& params,
                                                    const Mask& mask) {
  ForwardTileScheduler scheduler(params);
  while (scheduler.is_valid()) {
    scheduler.prefetch_next();
    const ForwardWorkTile work = scheduler.work();
    const int kv_head = work.head / (params.heads / params.kv_heads);
    const TileRange key_tiles =
        kSegments ? params.segments.key_tiles[work.sequence * params.query_tiles + work.query_tile]
                  : mask.visible_key_tiles(work.query_tile);
    producer.load(work, key_tiles, kv_head, params.q_order.place(work.head));
    scheduler.advance();
  }
  producer.load_tail();
}

// ---- The backward. A ticket is a key tile of a head. The key tiles of a head add to the same
// tiles of dq, in a fixed order, so that a gradient repeats bit for bit: first those below `split`,
// the last of them first, then the others, the first of them first. Tickets have the same order:
//
//   4 key tiles, split 4    3 2 1 0      as columns of tile_coord: heads alternate
//   4 key tiles, split 2    1 0, 2 3     the first halves of some heads, then their second halves
//
// So a tile waits for tiles with earlier tickets only. A CTA works on the least of its tickets that
// are not done, so the least ticket of all waits for nobody, and there is no deadlock however few
// CTAs run. A CTA takes the next ticket when it has issued all loads of a tile, so that its first
// loads are there when the gradients of the tile before are stored.
//
// Without halves: under a causal mask tiles start at their own diagonal, the last with the fewest
// queries before it, so a tile never catches up with one before it. Several heads alternate, so
// that a CTA starts a tile some time after the tile before it in the same head, and waits less for
// it: on an H200 384 causal heads of 1024 queries, with a head dimension of 64, take 335 us for
// 345.
//
// In halves: that order leaves the longest tiles to the end of the grid, and with few, long tiles
// (heads that share keys) many SMs idle there. Where the first halves of a group of heads fill the
// grid, the CTA that is done first, with the shortest tile of a first half, takes the longest of a
// second half, and so on. All CTAs have equal work, and the last tiles to be taken are the
// shortest.

// A head as the row and a step of the head's order as the column.
__host__ __device__ __forceinline__ constexpr TileCoord tile_coord_in_halves(int ticket, int heads,
                                                                             int key_tiles,
                                                                             int split,
                                                                             int heads_at_a_time) {
  const int first_of_group = ticket / (heads_at_a_time * key_tiles) * heads_at_a_time;
  const int left = heads - first_of_group;
  const int in_group = left < heads_at_a_time ? left : heads_at_a_time;
  const int rest = ticket - first_of_group * key_tiles;
  if (rest < in_group * split) return {first_of_group + rest / split, rest % split};
  const int others = rest - in_group * split;
  return {first_of_group + others % in_group, split + others / in_group};
}

// The tile of a ticket, without its query tiles.
__device__ __forceinline__ BackwardWorkTile backward_work_tile(const BackwardParams& params,
                                                               int key_tiles, int ticket) {
  const int heads = params.tiles / key_tiles;
  const TileCoord coord =
      params.split < key_tiles
          ? tile_coord_in_halves(ticket, heads, key_tiles, params.split, params.heads_at_a_time)
          : tile_coord(ticket, heads, key_tiles, params.heads_at_a_time);
  const int head = params.from_last ? heads - 1 - coord.row : coord.row;
  const int key_tile = coord.column < params.split ? params.split - 1 - coord.column : coord.column;
  return {head / params.kv_heads, head % params.kv_heads, key_tile, {0, 0}};
}

// How many additions to a tile of dq come before that of `key_tile`; `seen` is all that add to it.
__host__ __device__ __forceinline__ int dq_rank(int key_tile, const TileRange& seen, int split) {
  const int low_end = split < seen.end ? split : seen.end;
  if (key_tile < split) return low_end - 1 - key_tile;
  const int lows = low_end > seen.begin ? low_end - seen.begin : 0;
  return lows + key_tile - (split > seen.begin ? split : seen.begin);
}

// The key tile that adds last.
__host__ __device__ __forceinline__ int last_dq_key_tile(const TileRange& seen, int split) {
  return seen.end > split ? seen.end - 1 : seen.begin;
}

// Hands a work tile from the producer to kWorkReaders threads.
template <typename T, class Traits>
__device__ __forceinline__ void publish_work(BackwardSmem<T, Traits>& smem, PipelineState<2>& state,
                                             const BackwardWorkTile& tile) {
  smem.work_pipeline.producer_acquire(state);
  smem.work[state.stage] = tile;
  smem.work_pipeline.full[state.stage].arrive();
  state.advance();
}

template <typename T, class Traits>
__device__ __forceinline__ BackwardWorkTile next_work(BackwardSmem<T, Traits>& smem,
                                                      PipelineState<2>& state) {
  smem.work_pipeline.consumer_wait(state);
  const BackwardWorkTile tile = smem.work[state.stage];
  smem.work_pipeline.empty[state.stage].arrive();
  state.advance();
  return tile;
}

}  // namespace jaxllm::hopper
