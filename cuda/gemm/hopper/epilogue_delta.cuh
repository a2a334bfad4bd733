// dout = p, the gradient of attention's output, and two sums of it that attention's backward needs:
// delta = rowsum(dout * out) over the columns of each head, and partial sums of dout's columns.
#pragma once

#include "gemm/hopper/epilogue_source.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueDelta : EpilogueSource<Tile, T, ColumnSumWarp<Tile, T>> {
  struct Arguments {
    T* dout;
    const T* out;    // of attention, with heads of kSwizzleColumns
    float* delta;    // (sequences, heads, tokens)
    float* partial;  // (row tiles, columns)
    int64_t tokens;  // of a sequence; whole tiles
  };
  struct Params {
    CUtensorMap dout, out;
    float *delta, *partial;
    int tokens, rows, columns;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->delta = arguments.delta;
    params->partial = arguments.partial;
    params->tokens = static_cast<int>(arguments.tokens);
    params->rows = static_cast<int>(shape.rows);
    params->columns = static_cast<int>(shape.columns);
    JAXLLM_RETURN_IF_ERROR(EpilogueDelta::encode_subtiles(arguments.dout, shape, &params->dout));
    return EpilogueDelta::encode_subtiles(arguments.out, shape, &params->out);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) {
    this->template load_first<EpilogueDelta::kAhead>(params.out, work);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    float column_sums[16], delta[2] = {};
    this->change_source(
        params.out, params.dout, work, next, has_next,
        [&](const Subtile<Tile>& subtile, int j, int half, float2 out) {
          const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
          // As it is stored: attention's backward subtracts delta from products of that, and both
          // must be rounded alike.
          const float2 dout = unpack_pair<T>(pack_pair<T>(p.x, p.y));
          delta[half] += dout.x * out.x + dout.y * out.y;
          add_to_columns<Tile>(column_sums, subtile, j, half, dout);
          return dout;
        },
        [&](const Subtile<Tile>& subtile) {
          write_delta(delta, work, subtile);
          delta[0] = delta[1] = 0.0f;
          if (subtile.row_block() == Tile::kRowBlocks - 1) {
            write_column_sums<Tile>(*this, column_sums, work, subtile, params.rows, params.columns,
                                    params.partial);
          }
        });
  }

 private:
  // `delta` has the lane's part of rows lane / 4 and 8 below.
  __device__ __forceinline__ void write_delta(const float (&delta)[2], const WorkTile& work,
                                              const Subtile<Tile>& subtile) const {
    const int column = this->column(work, subtile), sequence = work.row / params.tokens;
    const int token = this->row(work, subtile) - sequence * params.tokens + this->lane / 4;
    const int64_t head =
        int64_t{sequence} * (params.columns / kSwizzleColumns) + column / kSwizzleColumns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = delta[half];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (this->lane % 4 == 0 && work.row < params.rows && column < params.columns) {
        params.delta[head * params.tokens + token + 8 * half] = sum;
      }
    }
  }
};

}  // namespace jaxllm::hopper
