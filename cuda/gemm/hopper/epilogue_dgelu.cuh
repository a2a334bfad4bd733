// out = p dgelu, elementwise, and partial sums of its columns: the dgrad GEMM of GELU's input, with
// the gradient of the bias.
#pragma once

#include "gemm/hopper/column_sums.cuh"
#include "gemm/hopper/dgelu_order.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueDgelu : ColumnSumWarp<Tile, T> {
  struct Arguments {
    T* out;
    const T* dgelu;
    float* partial;  // (row tiles, columns)
  };
  struct Params {
    CUtensorMap out;
    const T* dgelu;
    float* partial;
    int rows, columns, column_tiles;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->dgelu = arguments.dgelu;
    params->partial = arguments.partial;
    params->rows = static_cast<int>(shape.rows);
    params->columns = static_cast<int>(shape.columns);
    params->column_tiles = DgeluOrder<Tile>::column_tiles(shape.columns);
    return EpilogueDgelu::encode_subtiles(arguments.out, shape, &params->out);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) {
    constexpr int kFragments = DgeluOrder<Tile>::kFragments;
    const auto load_fragment = [&](int subtile, int i) {
      return __ldcs(DgeluOrder<Tile>::fragment(params.dgelu, params.column_tiles, work, this->warp,
                                               this->lane, {subtile}) +
                    i * 32);
    };
    // A lane's fragments are loaded one subtile ahead.
    uint4 next[kFragments];
#pragma unroll
    for (int i = 0; i < kFragments; ++i) next[i] = load_fragment(0, i);
    float column_sums[16];
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      uint32_t dgelu[4 * kFragments];  // a word for two neighbours of a row
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        const uint32_t words[4] = {next[i].x, next[i].y, next[i].z, next[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) dgelu[4 * i + w] = words[w];
        if (subtile.index + 1 < Tile::kSubtiles) {
          next[i] = load_fragment(subtile.index + 1, i);
        }
      }
      T* const out = this->acquire_buffer(subtile);
      write_subtile<T>(this->matrix_row(out), [&](int j, int half) {
        const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
        const float2 factor = unpack_pair<T>(dgelu[2 * j + half]);
        const float2 product = {p.x * factor.x, p.y * factor.y};
        add_to_columns<Tile>(column_sums, subtile, j, half, product);
        return product;
      });
      this->store_buffer(params.out, out, work, subtile);
      if (subtile.row_block() == Tile::kRowBlocks - 1) {
        write_column_sums<Tile>(*this, column_sums, work, subtile, params.rows, params.columns,
                                params.partial);
      }
    });
  }
};

}  // namespace jaxllm::hopper
