// The gradient of h, given that of gelu(h), p scale_a scale_b: in e5m2 over its scale, in both
// layouts. Where it is wanted, also partial sums of its columns before it is rounded: the gradient
// of a bias.
//
// TMA loads the subtiles of h a column block ahead, on into the warp's next tile.
#pragma once

#include "activation/gelu_each.cuh"
#include "gemm/hopper/column_sums.cuh"
#include "gemm/hopper/epilogue_float8.cuh"
#include "gemm/hopper/epilogue_gelu.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct Float8DgeluStorage : SubtileStorage<Tile, T, Tile::kRowBlocks> {  // of h, by row block
  Float8Columns<Tile, 1> columns;
  float sums[Tile::kConsumers][4][kSwizzleColumns];  // as those of ColumnSumStorage
};

template <class Tile, typename T>
struct EpilogueFloat8Dgelu
    : Float8Warp<Tile, 1, EpilogueWarp<Tile, T, Float8DgeluStorage<Tile, T>>> {
  struct Arguments {
    Float8Outputs<1> out;
    const T* h;  // (rows, columns)
    Float8Scales scales;
    float* partial;  // (row tiles, columns); nullptr where the sums are not wanted
  };
  struct Params {
    CUtensorMap h;
    Float8Params<1> out;
    Float8Scales scales;
    float* partial;
  };

  const Params& params;
  uint32_t phase = 0;  // of the barriers of the next column block

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->scales = arguments.scales;
    params->partial = arguments.partial;
    JAXLLM_RETURN_IF_ERROR(EpilogueFloat8Dgelu::encode_subtiles(arguments.h, shape, &params->h));
    return params->out.set(shape, arguments.out);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) {
    for (int row_block = 0; row_block < Tile::kRowBlocks; ++row_block) load_source(work, row_block);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    const float factor = params.scales.factor();
    const auto visit = [&](const WorkTile& block, const WorkTile& later, bool has_later) {
      float column_sums[16];
#pragma unroll
      for (int row_block = 0; row_block < Tile::kRowBlocks; ++row_block) {
        const Subtile<Tile> subtile{row_block};
        this->loaded(row_block).wait(phase);
        SubtileBytes bytes;
        multiply(accumulators, subtile, factor, bytes, column_sums);
        __syncwarp();  // all lanes have read the buffer
        if (has_later) load_source(later, row_block);
        // Not before the elements are computed: so the columns before these have time to leave.
        this->begin_block(subtile);
        this->put(bytes, 0, params.out, block, subtile);
        const bool has_sums = row_block == Tile::kRowBlocks - 1 && params.partial != nullptr;
        if (has_sums) {
          const float scale = __ldg(params.scales.out);
#pragma unroll
          for (float& of_column : column_sums) of_column *= scale;
          stage_column_sums(*this, column_sums);
        }
        this->end_block(params.out, block, subtile);  // after the last one the warps meet
        if (has_sums) {
          store_column_sums<Tile>(*this, block, subtile, params.out.rows, params.out.columns,
                                  params.partial);
        }
      }
      phase ^= 1;
    };
    for_each_column_block<Tile>(accumulators, work, next, has_next, visit);
  }

 private:
  __device__ __forceinline__ void load_source(const WorkTile& work, int row_block) const {
    if (this->lane == 0) this->load_buffer(params.h, row_block, work, {row_block});
  }

  // The elements of a subtile of the first column block, and their sums with those above.
  __device__ __forceinline__ void multiply(const Accumulators<Tile>& accumulators,
                                           const Subtile<Tile>& subtile, float factor,
                                           SubtileBytes& bytes, float (&column_sums)[16]) const {
    const uint32_t row = this->matrix_row(this->buffer(subtile.row_block()));
#pragma unroll
    for (int first = 0; first < 8; first += 2) {
      uint32_t words[4];
      ldmatrix(words, row ^ 16 * first);
      float dh[kActivationElements], dout[kActivationElements];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 h = unpack_pair<T>(words[i]);
        dh[2 * i] = h.x;
        dh[2 * i + 1] = h.y;
      }
      dgelu_each(dh);
      load_batch<Tile>(accumulators, subtile, first, dout);
#pragma unroll
      for (int i = 0; i < kActivationElements; ++i) dh[i] *= dout[i] * factor;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair{dh[2 * i], dh[2 * i + 1]};
        add_to_columns<Tile>(column_sums, subtile, first + i / 2, i % 2, pair);
      }
      bytes.set_batch(first, dh);
      end_basic_block(this->warp);
    }
    if (!isfinite(sum_of(column_sums))) bytes.restore_infinities();
  }

  // Infinite or NaN where an element of the columns is.
  __device__ __forceinline__ static float sum_of(const float (&column_sums)[16]) {
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = column_sums[i] + column_sums[i + 8];
#pragma unroll
    for (int count = 4; count > 0; count /= 2) {
#pragma unroll
      for (int i = 0; i < count; ++i) sums[i] += sums[i + count];
    }
    return sums[0];
  }
};

}  // namespace jaxllm::hopper
