// The gradients of the gates g and of what they gate, u, from that of silu(g) u, p scale_a scale_b:
// in e5m2 over their scale, beside each other, and in both layouts.
//
// TMA loads a subtile of g and one of u while the warp puts away the results of the one before, on
// into its next tile.
#pragma once

#include "activation/swiglu_each.cuh"
#include "gemm/hopper/epilogue_float8.cuh"
#include "gemm/hopper/epilogue_gelu.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct Float8DswigluStorage {
  T buffers[Tile::kConsumers][4][2][kSubtileSize];  // of a warp: subtiles of g and of u
  Barrier loaded[Tile::kConsumers][4][1];
  Float8Columns<Tile, 2> columns;

  __device__ __forceinline__ void init() {
    for (auto& of_consumer : loaded) {
      for (auto& of_warp : of_consumer) of_warp[0].init(1);
    }
  }
};

template <class Tile, typename T>
struct EpilogueFloat8Dswiglu
    : Float8Warp<Tile, 2, EpilogueWarp<Tile, T, Float8DswigluStorage<Tile, T>>> {
  struct Arguments {
    Float8Outputs<2> out;
    const T* h;  // (rows, 2 columns): g, then u
    Float8Scales scales;
  };
  struct Params {
    CUtensorMap h;
    Float8Params<2> out;
    Float8Scales scales;
  };

  const Params& params;
  uint32_t phase = 0;  // of the barrier of the next subtile

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->scales = arguments.scales;
    const GemmShape of_h{shape.rows, 2 * shape.columns, shape.depth};
    JAXLLM_RETURN_IF_ERROR(EpilogueFloat8Dswiglu::encode_subtiles(arguments.h, of_h, &params->h));
    return params->out.set(shape, arguments.out);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) { load_source(work, {0}); }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    const float factor = params.scales.factor();
    const auto visit = [&](const WorkTile& block, const WorkTile& later, bool has_later) {
#pragma unroll
      for (int row_block = 0; row_block < Tile::kRowBlocks; ++row_block) {
        const Subtile<Tile> subtile{row_block};
        this->loaded(0).wait(phase);
        phase ^= 1;
        SubtileBytes of_gate, of_up;
        multiply(accumulators, subtile, factor, of_gate, of_up);
        __syncwarp();  // all lanes have read the buffers
        if (row_block + 1 < Tile::kRowBlocks) {
          load_source(block, {row_block + 1});
        } else if (has_later) {
          load_source(later, {0});
        }
        // Not before the elements are computed: so the columns before these have time to leave.
        this->begin_block(subtile);
        this->put(of_gate, 0, params.out, block, subtile);
        this->put(of_up, 1, params.out, block, subtile);
        this->end_block(params.out, block, subtile);
      }
    };
    for_each_column_block<Tile>(accumulators, work, next, has_next, visit);
  }

 private:
  // The gradients of a subtile of the first column block.
  __device__ __forceinline__ void multiply(const Accumulators<Tile>& accumulators,
                                           const Subtile<Tile>& subtile, float factor,
                                           SubtileBytes& of_gate, SubtileBytes& of_up) const {
    float sum = 0.0f;  // infinite or NaN where a result is
#pragma unroll
    for (int first = 0; first < 8; first += 2) {
      uint32_t gates[4], ups[4];
      ldmatrix(gates, this->matrix_row(this->buffer(0)) ^ 16 * first);
      ldmatrix(ups, this->matrix_row(this->buffer(1)) ^ 16 * first);
      float dout[kActivationElements], dgate[kActivationElements], dup[kActivationElements];
      load_batch<Tile>(accumulators, subtile, first, dout);
#pragma unroll
      for (int i = 0; i < kActivationElements; ++i) {
        const float2 gate = unpack_pair<T>(gates[i / 2]), up = unpack_pair<T>(ups[i / 2]);
        float out[2];
        SwigluBackward{}({i % 2 ? gate.y : gate.x, i % 2 ? up.y : up.x, dout[i] * factor}, out);
        dgate[i] = out[0];
        dup[i] = out[1];
        sum += out[0] + out[1];
      }
      of_gate.set_batch(first, dgate);
      of_up.set_batch(first, dup);
      end_basic_block(this->warp);
    }
    if (!isfinite(sum)) {
      of_gate.restore_infinities();
      of_up.restore_infinities();
    }
  }

  // Beyond the last column of g a subtile has some of u: what becomes of these is not stored.
  __device__ __forceinline__ void load_source(const WorkTile& work,
                                              const Subtile<Tile>& subtile) const {
    if (this->lane > 0) return;
    Barrier& barrier = this->loaded(0);
    barrier.arrive_and_expect(2 * kSubtileSize * sizeof(T));
    const int row = this->row(work, subtile), column = this->column(work, subtile);
    tma_load_2d(this->buffer(0), params.h, column, row, barrier);
    tma_load_2d(this->buffer(1), params.h, params.out.columns + column, row, barrier);
  }
};

}  // namespace jaxllm::hopper
