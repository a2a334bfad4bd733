// The gradient of h, given that of gelu(h), p scale_a scale_b: in e5m2 over its scale, in both
// layouts. Where it is wanted, also partial sums of its columns before it is rounded: the gradient
// of a bias.
//
// TMA loads the subtiles of h two ahead, on into the warp's next tile.
#pragma once

#include "activation/gelu_each.cuh"
#include "gemm/hopper/column_sums.cuh"
#include "gemm/hopper/epilogue_float8.cuh"
#include "gemm/hopper/epilogue_gelu.cuh"

namespace jaxllm::hopper {

inline constexpr int kDgeluBuffers = 2;  // subtiles of h, of a warp

template <class Tile, typename T>
struct Float8DgeluStorage : SubtileStorage<Tile, T, kDgeluBuffers> {
  Float8Columns<Tile, 1> columns;
  float sums[Tile::kConsumers][4][kSwizzleColumns];  // as those of ColumnSumStorage
};

template <class Tile, typename T>
struct EpilogueFloat8Dgelu
    : Float8Warp<Tile, 1, EpilogueWarp<Tile, T, Float8DgeluStorage<Tile, T>>> {
  static_assert(Tile::kSubtiles % kDgeluBuffers == 0);  // a tile begins with the first buffer

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
  uint32_t phase = 0;  // of the barriers of the next subtiles

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->scales = arguments.scales;
    params->partial = arguments.partial;
    JAXLLM_RETURN_IF_ERROR(EpilogueFloat8Dgelu::encode_subtiles(arguments.h, shape, &params->h));
    return params->out.set(shape, arguments.out);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) {
    for (int index = 0; index < kDgeluBuffers; ++index) load_source(work, {index});
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    // The product of the operands' scales alone may be too small for a float.
    const float scale = __ldg(params.scales.out);
    const float factor = __ldg(params.scales.a) * (__ldg(params.scales.b) * __frcp_rn(scale));
    float column_sums[16];
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int index = subtile.index % kDgeluBuffers;
      this->loaded(index).wait(phase);
      if (index == kDgeluBuffers - 1) phase ^= 1;
      const uint32_t row = this->matrix_row(this->buffer(index));
      SubtileBytes bytes;
      uint32_t words[4], following[4];
      ldmatrix(following, row);
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = following[i];
        if (first < 6) ldmatrix(following, row ^ 16 * (first + 2));
        float dout[kActivationElements], dh[kActivationElements];
        load_batch<Tile>(accumulators, subtile, first, dout);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 h = unpack_pair<T>(words[i]);
          dh[2 * i] = h.x;
          dh[2 * i + 1] = h.y;
        }
        dgelu_each(dh);
#pragma unroll
        for (int i = 0; i < kActivationElements; ++i) dh[i] *= dout[i] * factor;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          add_to_columns<Tile>(column_sums, subtile, first + i / 2, i % 2,
                               {dh[2 * i], dh[2 * i + 1]});
        }
        bytes.set_batch(first, dh);
        end_basic_block(work.end_k_block);
      }
      if (!isfinite(sum_of(column_sums))) bytes.restore_infinities();
      __syncwarp();  // all lanes have read the buffer
      const int later = subtile.index + kDgeluBuffers;
      if (later < Tile::kSubtiles) {
        load_source(work, {later});
      } else if (has_next) {
        load_source(next, {later - Tile::kSubtiles});
      }
      // Not before the elements are computed: the columns before these have the time to leave.
      this->begin_block(subtile);
      this->put(bytes, 0, params.out, work, subtile);
      const bool is_last = subtile.row_block() == Tile::kRowBlocks - 1;
      const bool has_sums = is_last && params.partial != nullptr;
      if (has_sums) {
#pragma unroll
        for (float& of_column : column_sums) of_column *= scale;
        stage_column_sums(*this, column_sums);
      }
      this->end_block(params.out, work, subtile);  // all warps meet
      if (has_sums) {
        store_column_sums<Tile>(*this, work, subtile, params.out.rows, params.out.columns,
                                params.partial);
      }
    });
  }

 private:
  // Infinite or NaN where an element of the lane's columns is.
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

  __device__ __forceinline__ void load_source(const WorkTile& work,
                                              const Subtile<Tile>& subtile) const {
    if (this->lane > 0) return;
    this->load_buffer(params.h, subtile.index % kDgeluBuffers, work, subtile);
  }
};

}  // namespace jaxllm::hopper
