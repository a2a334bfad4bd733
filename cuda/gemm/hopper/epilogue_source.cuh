// Epilogues with a source: an array of the result's shape whose subtiles TMA loads three ahead, on
// into the warp's next tile. A finished subtile leaves through the buffer that its source came in:
//
//   buffers   0: store s    1: s + 1 arriving    2: s + 2 arriving    3: s + 3 arriving
#pragma once

#include "gemm/hopper/column_sums.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T, class Warp = EpilogueWarp<Tile, T>>
struct EpilogueSource : Warp {
  static constexpr int kAhead = kSubtileBuffers - 1;

  int subtiles_done = 0;

  // Starts to load a tile's first kCount subtiles.
  template <int kCount>
  __device__ __forceinline__ void load_first(const CUtensorMap& source, const WorkTile& work) {
    static_assert(kCount <= Tile::kSubtiles && kCount <= kSubtileBuffers);
    if (this->lane > 0) return;
    for (int index = 0; index < kCount; ++index) {
      this->load_buffer(source, (subtiles_done + index) % kSubtileBuffers, work, {index});
    }
  }

  // The buffer of a subtile, once its source has arrived.
  __device__ __forceinline__ int wait_for_source(const Subtile<Tile>& subtile) {
    const int position = subtiles_done + subtile.index, index = position % kSubtileBuffers;
    this->loaded(index).wait(position / kSubtileBuffers & 1);
    return index;
  }

  // Replaces each pair of every subtile of the source by change(subtile, j, half, pair), stores it,
  // and calls done(subtile).
  template <class Change, class Done>
  __device__ __forceinline__ void change_source(const CUtensorMap& source, const CUtensorMap& out,
                                                const WorkTile& work, const WorkTile& next,
                                                bool has_next, const Change& change,
                                                const Done& done) {
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int index = wait_for_source(subtile);
      change_subtile<T>(this->matrix_row(this->buffer(index)), [&](int j, int half, float2 pair) {
        return change(subtile, j, half, pair);
      });
      this->store_buffer(out, this->buffer(index), work, subtile);
      if (this->lane == 0) {
        // The subtile before this one has left its buffer.
        tma_store_wait_read<1>();
        const int free = (index + kAhead) % kSubtileBuffers, later = subtile.index + kAhead;
        if (later < Tile::kSubtiles) {
          this->load_buffer(source, free, work, {later});
        } else if (has_next) {
          this->load_buffer(source, free, next, {later - Tile::kSubtiles});
        }
      }
      __syncwarp();
      done(subtile);
    });
    subtiles_done += Tile::kSubtiles;
  }
};

}  // namespace jaxllm::hopper
