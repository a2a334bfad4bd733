// The residual add and the next layer norm. The residual is kept normalized:
//
//   y = p + bias + xhat / rstd    out = rstd' (y - mean(y))    rstd' = 1 / sqrt(var(y) + eps)
//
// The residual itself is xhat / rstd + mean. A constant that is added to a row changes its mean and
// nothing else, so of the residual only xhat, rstd and mean are in memory.
//
// A tile leaves its mean of each row and the sum of squared differences from it for the other tiles
// (row_sums.cuh). Such pairs merge without cancellation, whatever the mean (Chan et al., 1979).
#pragma once

#include "gemm/hopper/row_sums.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueResidualNorm : EpilogueRows<Tile, T> {
  struct Arguments {
    T* out;
    const T* xhat;
    const T* bias;
    const float *mean, *rstd;
    float *new_mean, *new_rstd;
    float* row_sums;
    float eps;
  };
  struct Params {
    CUtensorMap out, xhat;
    RowSumParams rows;
    const T* bias;
    const float* mean;
    float *new_mean, *new_rstd;
    float eps;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& a, Params* params) {
    params->rows = EpilogueResidualNorm::to_row_params(shape, a.rstd, a.row_sums);
    params->bias = a.bias;
    params->mean = a.mean;
    params->new_mean = a.new_mean;
    params->new_rstd = a.new_rstd;
    params->eps = a.eps;
    JAXLLM_RETURN_IF_ERROR(EpilogueResidualNorm::encode_subtiles(a.out, shape, &params->out));
    return EpilogueResidualNorm::encode_subtiles(a.xhat, shape, &params->xhat);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) {
    this->template load_first<kSubtileBuffers>(params.xhat, work);
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    BiasFragment<Tile, T> bias;
    bias.load(params.bias, work, params.rows.columns, this->lane);
    this->load_rstd(params.rows, work);
    bias.fill(accumulators, this->lane);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    float totals[Tile::kRowBlocks][2];
    add_residual(accumulators, work, totals);
    leave_moments(accumulators, work, totals);
    const Statistics of_y = collect_moments(work);
    const int row = this->row_of_lane(work);
    if (work.column == 0 && row < params.rows.rows) {
      params.new_mean[row] = params.mean[row] + of_y.mean;
      params.new_rstd[row] = of_y.rstd;
    }
    opaque(this->subtiles_done);  // the buffers' addresses of both passes would be spilled
    store_normalized(accumulators, work, of_y);
    this->subtiles_done += Tile::kSubtiles;
    if (has_next) {
      if (this->lane == 0) tma_store_wait_read<0>();
      prefetch_source(next);
    }
  }

 private:
  struct Statistics {
    float mean, rstd;  // of the lane's row
  };

  // Makes y of p + bias in the accumulators, and adds up the rows.
  __device__ __forceinline__ void add_residual(Accumulators<Tile>& accumulators,
                                               const WorkTile& work,
                                               float (&totals)[Tile::kRowBlocks][2]) {
    const float deviation_of_row = __fdividef(1.0f, this->rstd);
    float deviation[Tile::kRowBlocks][2];
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        deviation[block][half] = this->value_of_row(deviation_of_row, block, half);
        totals[block][half] = 0.0f;
      }
    }
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int index = this->wait_for_source(subtile), block = subtile.row_block();
      read_subtile<T>(this->matrix_row(this->buffer(index)), [&](int j, int half, float2 xhat) {
        float* const y = accumulators[block] + accumulator_index(subtile.column_block(), j, half);
        y[0] += deviation[block][half] * xhat.x;
        y[1] += deviation[block][half] * xhat.y;
        totals[block][half] += y[0];
        totals[block][half] += y[1];
      });
      __syncwarp();
      if (this->lane == 0 && subtile.index + kSubtileBuffers < Tile::kSubtiles) {
        this->load_buffer(params.xhat, index, work, {subtile.index + kSubtileBuffers});
      }
    });
  }

  // Leaves the mean of this tile's part of each row and the sum of squared differences from it.
  __device__ __forceinline__ void leave_moments(Accumulators<Tile>& accumulators,
                                                const WorkTile& work,
                                                const float (&totals)[Tile::kRowBlocks][2]) const {
    const int columns = min(Tile::kBlockN, params.rows.columns - work.column);
    float mean[Tile::kRowBlocks][2], squares[Tile::kRowBlocks][2];
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mean[block][half] = __fdividef(this->sum_over_lanes_of_row(totals[block][half]), columns);
        squares[block][half] = 0.0f;
      }
    }
    // Columns beyond the last are zeros so far. They must not differ from the mean.
    if (columns < Tile::kBlockN) {
#pragma unroll
      for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < Tile::kBlockN / 2; ++i) {
          if (i / 4 * 8 >= columns) accumulators[block][i] = mean[block][i / 2 % 2];
        }
      }
    }
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Tile::kBlockN / 2; ++i) {
        const int half = i / 2 % 2;
        const float difference = accumulators[block][i] - mean[block][half];
        squares[block][half] += difference * difference;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        squares[block][half] = this->sum_over_lanes_of_row(squares[block][half]);
      }
    }
    this->leave_row_sums(params.rows, work, mean, squares);
  }

  __device__ __forceinline__ Statistics collect_moments(const WorkTile& work) const {
    float count = 0.0f, mean = 0.0f, squares = 0.0f;
    this->visit_row_sums(params.rows, work, [&](float2 of_tile, int tile) {
      const float more = min(Tile::kBlockN, params.rows.columns - tile * Tile::kBlockN);
      const float total = count + more, weight = __fdividef(more, total);
      const float difference = of_tile.x - mean;
      mean += difference * weight;
      squares += of_tile.y + difference * difference * weight * count;
      count = total;
    });
    return {mean, rsqrtf(__fdividef(squares, count) + params.eps)};
  }

  // Stores rstd (y - mean).
  __device__ __forceinline__ void store_normalized(const Accumulators<Tile>& accumulators,
                                                   const WorkTile& work,
                                                   const Statistics& of_row) const {
    const float shift_of_row = -of_row.mean * of_row.rstd;
    float rstd[Tile::kRowBlocks][2], shift[Tile::kRowBlocks][2];
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rstd[block][half] = this->value_of_row(of_row.rstd, block, half);
        shift[block][half] = this->value_of_row(shift_of_row, block, half);
      }
    }
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int block = subtile.row_block();
      T* const out = this->buffer((this->subtiles_done + subtile.index) % kSubtileBuffers);
      if (subtile.index >= kSubtileBuffers) {
        if (this->lane == 0) tma_store_wait_read<kSubtileBuffers - 1>();
        __syncwarp();
      }
      write_subtile<T>(this->matrix_row(out), [&](int j, int half) {
        const float2 y = accumulator_pair<Tile>(accumulators, subtile, j, half);
        return float2{rstd[block][half] * y.x + shift[block][half],
                      rstd[block][half] * y.y + shift[block][half]};
      });
      this->store_buffer(params.out, out, work, subtile);
    });
  }
};

}  // namespace jaxllm::hopper
