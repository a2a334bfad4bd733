// out = p + bias in float32, whatever the operands' type.
#pragma once

#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueFloat32 : EpilogueWarp<Tile, T> {
  struct Arguments {
    float* out;
    const T* bias;  // null for none
  };
  struct Params {
    float* out;
    const T* bias;
    int rows, columns;
  };

  const Params& params;
  BiasFragment<Tile, T> bias;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    *params = {arguments.out, arguments.bias, static_cast<int>(shape.rows),
               static_cast<int>(shape.columns)};
    return cudaSuccess;
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    bias.load(params.bias, work, params.columns, this->lane);
    EpilogueWarp<Tile, T>::begin(work, accumulators);
  }

  // Past shared memory: four lanes of a row write 32 bytes, a sector.
  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) {
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int row = this->row(work, subtile) + this->lane / 4;
      const int column = this->column(work, subtile) + this->lane % 4 * 2;
      float* const out = params.out + row * int64_t{params.columns} + column;
      float* const rows[2] = {out, out + 8 * int64_t{params.columns}};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 of_columns = bias.pair(subtile.column_block(), j, this->lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
          if (row + 8 * half < params.rows && column + 8 * j < params.columns) {
            *reinterpret_cast<float2*>(rows[half] + 8 * j) = {p.x + of_columns.x,
                                                              p.y + of_columns.y};
          }
        }
      }
    });
  }
};

}  // namespace jaxllm::hopper
