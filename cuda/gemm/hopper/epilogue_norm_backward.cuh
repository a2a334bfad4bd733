// The layer norm's backward, where p is the gradient of its output before scale and bias. The
// gradient of its input is added to the gradient along the residual, which is in memory already:
//
//   dx += rstd (p - mean(p) - xhat mean(p xhat)),  xhat = rstd (x - mean(x))
//
// The means are over a row (row_sums.cuh). Also sums over all rows of dx as it came, the gradient
// of the bias of the GEMM before it.
#pragma once

#include "gemm/hopper/row_sums.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueNormBackward : EpilogueRows<Tile, T> {
  // Rows of `partial` for CTAs that have the tiles of a row between them: one for each warp.
  static constexpr int kPartialRows = Tile::kCluster * Tile::kConsumers * 4;
  // Two passes read xhat and then xhat and dx. Of six subtiles and four buffers:
  //
  //   pass 1   xhat 0 1 2 3 4 5      buffers 0 1 2 3 0 1
  //   pass 2   xhat 5 4 3 2 1 0      buffers 1 0 1 0 1 0: the first two are still there
  //            dx   5 4 3 2 1 0      buffers 2 3 2 3 2 3
  static_assert(Tile::kSubtiles == 6 && kSubtileBuffers == 4);

  struct Arguments {
    T* dx;
    const T* xhat;
    const float* rstd;
    float* row_sums;
    float* partial;
  };
  struct Params {
    CUtensorMap dx, xhat;
    RowSumParams rows;
    float* partial;
  };

  const Params& params;
  float2 column_sums[Tile::kColumnBlocks];  // over all rows that the warp sees

  static cudaError_t to_params(const GemmShape& shape, const Arguments& a, Params* params) {
    params->rows = EpilogueNormBackward::to_row_params(shape, a.rstd, a.row_sums);
    params->partial = a.partial;
    JAXLLM_RETURN_IF_ERROR(EpilogueNormBackward::encode_subtiles(a.dx, shape, &params->dx));
    return EpilogueNormBackward::encode_subtiles(a.xhat, shape, &params->xhat);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) {
    this->template load_first<kSubtileBuffers>(params.xhat, work);
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    this->load_rstd(params.rows, work);
    EpilogueWarp<Tile, T>::begin(work, accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    sum_rows(accumulators, work);
    float total = 0.0f, of_products = 0.0f;
    this->visit_row_sums(params.rows, work, [&](float2 of_tile, int) {
      total += of_tile.x;
      of_products += of_tile.y;
    });
    const float factor = -this->rstd / params.rows.columns;
    add_gradient(accumulators, work, factor * of_products, factor * total);
    if (has_next) {
      if (this->lane == 0) tma_store_wait_read<0>();
      prefetch_source(next);
    }
  }

  // Writes the warp's column sums, a row of `partial`. All tiles of a CTA have the same columns.
  __device__ __forceinline__ void finish() const {
    const int cluster = blockIdx.x / Tile::kCluster, rank = blockIdx.x % Tile::kCluster;
    const int row = cluster / params.rows.column_tiles * kPartialRows +
                    (rank * Tile::kConsumers + this->consumer) * 4 + this->warp;
    const int first = cluster % params.rows.column_tiles * Tile::kBlockN;
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const int column = first + block * kSwizzleColumns + summed_column(this->lane);
      float* const partial = params.partial + int64_t{row} * params.rows.columns + column;
      if (column < params.rows.columns) *reinterpret_cast<float2*>(partial) = column_sums[block];
    }
  }

 private:
  // Waits until a buffer has been loaded for the `use`-th time in this tile, an even number of
  // times in all.
  __device__ __forceinline__ void wait(int index, int use) const {
    this->loaded(index).wait(use & 1);
  }

  // Pass 1: leaves the sums of p and of p xhat over each row.
  __device__ __forceinline__ void sum_rows(const Accumulators<Tile>& accumulators,
                                           const WorkTile& work) const {
    float of_p[Tile::kRowBlocks][2] = {}, of_products[Tile::kRowBlocks][2] = {};
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const int index = subtile.index % kSubtileBuffers, block = subtile.row_block();
      wait(index, subtile.index / kSubtileBuffers);
      read_subtile<T>(this->matrix_row(this->buffer(index)), [&](int j, int half, float2 xhat) {
        const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
        of_p[block][half] += p.x;
        of_p[block][half] += p.y;
        of_products[block][half] += p.x * xhat.x;
        of_products[block][half] += p.y * xhat.y;
      });
      __syncwarp();
      if (this->lane == 0) {
        if (subtile.index + kSubtileBuffers < Tile::kSubtiles) {
          this->load_buffer(params.xhat, index, work, {subtile.index + kSubtileBuffers});
        }
        // Buffers 2 and 3 have done their part for xhat.
        if (subtile.index == 2 || subtile.index == 3) {
          this->load_buffer(params.dx, index, work, {Tile::kSubtiles + 1 - index});
        }
      }
    });
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of_p[block][half] = this->sum_over_lanes_of_row(of_p[block][half]);
        of_products[block][half] = this->sum_over_lanes_of_row(of_products[block][half]);
      }
    }
    this->leave_row_sums(params.rows, work, of_p, of_products);
  }

  // Pass 2: dx += rstd p + factor xhat + constant, of the lane's row.
  __device__ __forceinline__ void add_gradient(const Accumulators<Tile>& accumulators,
                                               const WorkTile& work, float factor_of_row,
                                               float constant_of_row) {
    float of_columns[16];
#pragma unroll
    for (int visited = 0; visited < Tile::kSubtiles; ++visited) {
      const Subtile<Tile> subtile{Tile::kSubtiles - 1 - visited};
      const int block = subtile.row_block();
      const int xhat_index = 1 - visited % 2, dx_index = 2 + visited % 2;
      float rstd[2], factor[2], constant[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rstd[half] = this->value_of_row(this->rstd, block, half);
        factor[half] = this->value_of_row(factor_of_row, block, half);
        constant[half] = this->value_of_row(constant_of_row, block, half);
      }
      if (block == Tile::kRowBlocks - 1) {
#pragma unroll
        for (float& sum : of_columns) sum = 0.0f;
      }
      if (visited >= 2) wait(xhat_index, 1 + visited / 2);
      wait(dx_index, 1 + visited / 2);
      T* const dx = this->buffer(dx_index);
      const uint32_t xhat_row = this->matrix_row(this->buffer(xhat_index));
      const uint32_t row = this->matrix_row(dx);
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
        if (first == 4 && visited > 0 && subtile.index > 0 && this->lane == 0) {
          // By now the subtile before has left its buffer.
          tma_store_wait_read<0>();
          this->load_buffer(params.dx, 5 - dx_index, work, {subtile.index - 1});
        }
        uint32_t xhat_words[4], words[4];
        ldmatrix(xhat_words, xhat_row ^ 16 * first);
        ldmatrix(words, row ^ 16 * first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + i / 2, half = i % 2;
          const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
          const float2 old = unpack_pair<T>(words[i]), xhat = unpack_pair<T>(xhat_words[i]);
          of_columns[2 * j] += old.x;
          of_columns[2 * j + 1] += old.y;
          words[i] =
              pack_pair<T>(old.x + (rstd[half] * p.x + (factor[half] * xhat.x + constant[half])),
                           old.y + (rstd[half] * p.y + (factor[half] * xhat.y + constant[half])));
        }
        stmatrix(row ^ 16 * first, words);
      }
      this->store_buffer(params.dx, dx, work, subtile);
      if (this->lane == 0 && subtile.index >= 2) {
        this->load_buffer(params.xhat, xhat_index, work, {subtile.index - 2});
      }
      if (block == 0) {
        const float2 two = sum_over_rows(of_columns, this->lane);
        column_sums[subtile.column_block()].x += two.x;
        column_sums[subtile.column_block()].y += two.y;
      }
    }
  }
};

}  // namespace jaxllm::hopper
