// What an epilogue does whose results are 8-bit floats, as matrices and transposed.
//
// A subtile is rounded in registers. Its rows leave from there, 16 bytes of a lane. Its columns go
// through shared memory, where the four warps of a consumer put theirs together:
//
//   registers   lane 4 r + q: 2 bytes, of columns 8 j + 2 q and the next, for each j, in rows r and
//               r + 8
//   rows        four lanes exchange words: lane q has 16 bytes of the row, from column 16 q on
//   columns     lanes exchange words: lane 4 k + q has rows 2 k and 2 k + 1 of the same columns.
//               stmatrix puts the 16 rows of a column together
//
//   shared      64 columns of 128 bytes in TMA's swizzle     one store of a column block
#pragma once

#include "common/float8.cuh"
#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

// ---- A rounded subtile in registers.

// of[half][i]: the pairs of columns 8 j to 8 j + 7, of j = 2 i and of the next j.
struct SubtileBytes {
  uint32_t of[2][4];

  // The pairs of two neighbouring j in e5m2, in the order of a batch of epilogue_gelu.cuh.
  // Infinities become the largest number: to tell them from others costs four instructions a pair.
  __device__ __forceinline__ void set_batch(int first, const float (&x)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const pair = x + 2 * half;
      of[half][first / 2] = float8::round_four_saturated({pair[0], pair[1]}, {pair[4], pair[5]});
    }
  }

  // Makes infinities of the largest numbers. For a lane that had an infinity: no finite
  // number is as large where its scale is that of a bound that is an eighth too large.
  __device__ __forceinline__ void restore_infinities() {
#pragma unroll
    for (auto& of_half : of) {
#pragma unroll
      for (uint32_t& word : of_half) {
        word += __vcmpeq4(word & 0x7f7f7f7fu, 0x7b7b7b7bu) & 0x01010101u;
      }
    }
  }

  // The 16 bytes of row lane / 4 + 8 `half` from column 16 (lane % 4) on.
  __device__ __forceinline__ uint4 row(int half, int lane) const {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = of[half][i];
    // Transposes the words of four lanes: first in squares of two, then these.
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool is_second = lane & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        uint32_t& first = w[i];
        uint32_t& second = w[i + distance];
        const uint32_t got = __shfl_xor_sync(0xffffffff, is_second ? first : second, distance);
        first = is_second ? got : first;
        second = is_second ? second : got;
      }
    }
    return {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
            __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632)};
  }

  // Of each j, rows 2 k and 2 k + 1, k = lane / 4, of columns 8 j + 2 (lane % 4), in the lower half
  // of the word, and the next.
  __device__ __forceinline__ void row_pairs(int lane, uint32_t (&pairs)[8]) const {
    // Lanes 4 apart: one has the rows of both above, the other those 8 below.
    const bool is_below = lane & 4;
    const uint32_t even_j = is_below ? 0x1504 : 0x5140, odd_j = is_below ? 0x3726 : 0x7362;
    const int k = lane / 4, from = 4 * (2 * (k % 4) + k / 4) + lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t own = is_below ? of[1][i] : of[0][i];
      const uint32_t got = __shfl_xor_sync(0xffffffff, is_below ? of[0][i] : of[1][i], 4);
      pairs[2 * i] = __shfl_sync(0xffffffff, __byte_perm(own, got, even_j), from);
      pairs[2 * i + 1] = __shfl_sync(0xffffffff, __byte_perm(own, got, odd_j), from);
    }
  }
};

// ---- The results of a GEMM.

// Where kResults matrices go that lie beside each other.
template <int kResults>
struct Float8Outputs {
  uint8_t* values;      // (rows, kResults columns)
  uint8_t* transposed;  // (kResults columns, rows)
};

template <int kResults>
struct Float8Params {
  CUtensorMap transposed[kResults];
  uint8_t* values;
  int rows, columns;

  cudaError_t set(const GemmShape& shape, const Float8Outputs<kResults>& out) {
    values = out.values;
    rows = static_cast<int>(shape.rows);
    columns = static_cast<int>(shape.columns);
    for (int k = 0; k < kResults; ++k) {
      const Matrix matrix{out.transposed + k * shape.columns * shape.rows, shape.columns,
                          shape.rows, 1};
      JAXLLM_RETURN_IF_ERROR(encode_matrix_map(matrix, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                               kSwizzleColumns, &transposed[k], kSwizzleRowBytes));
    }
    return cudaSuccess;
  }
};

// The columns of a column block, before they leave: of the 128 rows of a consumer.
template <class Tile, int kResults>
struct Float8Columns {
  static_assert(Tile::kConsumerM == kSwizzleRowBytes);
  alignas(1024) uint8_t of[Tile::kConsumers][kResults][kSwizzleColumns * kSwizzleRowBytes];
};

// The part of an epilogue after the rounding. `Warp` is an EpilogueWarp whose storage has
// Float8Columns, `columns`.
template <class Tile, int kResults, class Warp>
struct Float8Warp : Warp {
  // Before a column block: the columns of the one before have left.
  __device__ __forceinline__ void begin_block(const Subtile<Tile>& subtile) const {
    if (subtile.row_block() != 0) return;
    if (is_leader()) tma_store_wait_read<0>();
    meet();
  }

  // Stores the rows of a result's subtile, and stages its columns.
  __device__ __forceinline__ void put(const SubtileBytes& bytes, int result,
                                      const Float8Params<kResults>& params, const WorkTile& work,
                                      const Subtile<Tile>& subtile) const {
    const int row = this->row(work, subtile) + this->lane / 4;
    const int column = this->column(work, subtile) + this->lane % 4 * 16;
    const int64_t stride = kResults * int64_t{params.columns};
    uint8_t* const to = params.values + result * params.columns + row * stride + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 of_row = bytes.row(half, this->lane);
      if (row + 8 * half < params.rows && column < params.columns) {
        *reinterpret_cast<uint4*>(to + 8 * half * stride) = of_row;
      }
    }
    uint32_t pairs[8];
    bytes.row_pairs(this->lane, pairs);
    const int chunk = subtile.row_block() * 4 + this->warp;  // of 16 rows
    // The lane names column `lane` of each 32 columns. By TMA's swizzle that is also where in the
    // column a chunk lies.
    uint8_t* const staged = this->smem.columns.of[this->consumer][result] +
                            this->lane * kSwizzleRowBytes + (chunk ^ this->lane % 8) * 16;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t words[4] = {pairs[4 * m], pairs[4 * m + 1], pairs[4 * m + 2],
                                 pairs[4 * m + 3]};
      stmatrix_transposed(smem_address(staged + m * 32 * kSwizzleRowBytes), words);
    }
  }

  // After the last subtile of a column block.
  __device__ __forceinline__ void end_block(const Float8Params<kResults>& params,
                                            const WorkTile& work,
                                            const Subtile<Tile>& subtile) const {
    if (subtile.row_block() != Tile::kRowBlocks - 1) return;
    fence_async_proxy();
    meet();
    if (!is_leader()) return;
#pragma unroll
    for (int k = 0; k < kResults; ++k) {
      tma_store_2d(params.transposed[k], this->smem.columns.of[this->consumer][k], work.row,
                   this->column(work, subtile));
    }
    tma_store_commit();
  }

 private:
  __device__ __forceinline__ bool is_leader() const { return this->warp == 0 && this->lane == 0; }
  __device__ __forceinline__ void meet() const {
    constexpr int kNamedBarrier = 1;  // + consumer
    named_barrier_sync(kNamedBarrier + this->consumer, kWarpgroup);
  }
};

// ---- Column blocks in a loop.

// Calls visit(block, later, has_later) for each column block of a tile: `block` is the column block
// as a tile, `later` the one after it, on into the warp's next tile. The accumulators of the column
// block are the first ones.
//
// With all subtiles of a tile one after the other the GEMM with SwiGLU's gradient had 103 KB of
// instructions, most of which run once a tile, and has 46 in this loop. It and that with GELU's
// took 2 to 8% less time so on H200s. Registers have no index: the accumulators of the next column
// block move to where those of the first were. After the last block they move too, for nothing:
// else the compiler would keep the first ones.
template <class Tile, class Visit>
__device__ __forceinline__ void for_each_column_block(Accumulators<Tile>& accumulators,
                                                      const WorkTile& work, const WorkTile& next,
                                                      bool has_next, const Visit& visit) {
  static_assert(Tile::kColumnBlocks == 3);
  constexpr int kCount = accumulator_index(1, 0, 0);  // of a column block
  WorkTile block = work;
#pragma unroll 1
  for (int index = 0; index < Tile::kColumnBlocks; ++index) {
    const bool is_last = index + 1 == Tile::kColumnBlocks;
    WorkTile later = block;
    later.column += kSwizzleColumns;
    if (is_last) later = next;
    visit(block, later, !is_last || has_next);
    block.column += kSwizzleColumns;
#pragma unroll
    for (auto& of_block : accumulators) {
      if (index == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) of_block[i] = of_block[kCount + i];
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) of_block[i] = of_block[2 * kCount + i];
      }
    }
  }
}

// ---- Scales.

// The scales of the operands, one each, and of the result.
struct Float8Scales {
  const float* a;
  const float* b;
  const float* out;

  // What a product is multiplied by before it is rounded. That of the operands' scales alone may be
  // too small for a float.
  __device__ __forceinline__ float factor() const {
    return __ldg(a) * (__ldg(b) * __frcp_rn(__ldg(out)));
  }
};

}  // namespace jaxllm::hopper
