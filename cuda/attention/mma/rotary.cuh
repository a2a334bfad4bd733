// Rotary embeddings of a CTA's own rows.
#pragma once

#include "attention/mma/tile.cuh"

namespace jaxllm::attention {

struct Rotary {
  const float *cos, *sin;  // null for none
  int sequences;           // that share a table
  int pairs;
  bool interleaved, whole_packs;
};

inline Rotary make_rotary(const FlashShape& shape, const FlashRope& rope) {
  if (rope.cos == nullptr) return {};
  return {rope.cos,
          rope.sin,
          static_cast<int>(shape.batch / rope.tables),
          static_cast<int>(rope.pairs),
          rope.interleaved,
          rope.pairs % 8 == 0 && aligned_16(rope.cos, rope.sin)};
}

// Rotates kRows rows of a warp, in shared memory, by `sign` times the angles of their positions,
// first, first + 1, ... of `length`. No other warp reads or writes the rows meanwhile.
template <int kHeadDim, int kRows, typename T>
__device__ void apply_rotary(T* tile, const Rotary& rotary, float sign, int b, int first,
                             int length) {
  const int lane = threadIdx.x % 32, pairs = rotary.pairs;
  const int64_t table = int64_t{b / rotary.sequences} * length * pairs;
  __syncwarp();
  if (rotary.whole_packs) {  // eight pairs at a time
    for (int index = lane; index < kRows * pairs / 8; index += 32) {
      const int row = index / (pairs / 8), pair = index % (pairs / 8) * 8;
      if (first + row >= length) break;
      const int64_t offset = table + int64_t{first + row} * pairs + pair;
      const auto cos = load_cached<8>(rotary.cos + offset);
      const auto sin = load_cached<8>(rotary.sin + offset);
      T* first_pack = tile + row * kSmemStride<kHeadDim> + (rotary.interleaved ? 2 * pair : pair);
      T* second_pack = first_pack + (rotary.interleaved ? 8 : pairs);
      const Pack<T> packs[2] = {load<8>(first_pack), load<8>(second_pack)};
      float rotated[2][8];
      const auto rotate = [&](int i, float x, float y, float& out_x, float& out_y) {
        out_x = x * cos[i] - y * (sign * sin[i]);
        out_y = y * cos[i] + x * (sign * sin[i]);
      };
      if (rotary.interleaved) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int pack = i / 4, column = 2 * i % 8;
          rotate(i, packs[pack][column], packs[pack][column + 1], rotated[pack][column],
                 rotated[pack][column + 1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          rotate(i, packs[0][i], packs[1][i], rotated[0][i], rotated[1][i]);
        }
      }
      store(first_pack, Pack<T>::of(rotated[0]));
      store(second_pack, Pack<T>::of(rotated[1]));
    }
  } else {
    for (int index = lane; index < kRows * pairs; index += 32) {
      const int row = index / pairs, pair = index % pairs;
      if (first + row >= length) break;
      const int64_t offset = table + int64_t{first + row} * pairs + pair;
      const float cos = rotary.cos[offset], sin = sign * rotary.sin[offset];
      T* a = tile + row * kSmemStride<kHeadDim> + (rotary.interleaved ? 2 * pair : pair);
      T* b_of_pair = a + (rotary.interleaved ? 1 : pairs);
      const float x = to_float(*a), y = to_float(*b_of_pair);
      *a = from_float<T>(x * cos - y * sin);
      *b_of_pair = from_float<T>(y * cos + x * sin);
    }
  }
  __syncwarp();
}

}  // namespace jaxllm::attention
