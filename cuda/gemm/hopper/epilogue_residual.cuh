// out = p + bias + residual, rounded once.
#pragma once

#include "gemm/hopper/epilogue_source.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueResidual : EpilogueSource<Tile, T> {
  struct Arguments {
    T* out;
    const T* residual;
    const T* bias;
  };
  struct Params {
    CUtensorMap out, residual;
    const T* bias;
    int columns;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->bias = arguments.bias;
    params->columns = static_cast<int>(shape.columns);
    JAXLLM_RETURN_IF_ERROR(EpilogueResidual::encode_subtiles(arguments.out, shape, &params->out));
    return EpilogueResidual::encode_subtiles(arguments.residual, shape, &params->residual);
  }

  __device__ __forceinline__ void prefetch_source(const WorkTile& work) {
    this->template load_first<EpilogueResidual::kAhead>(params.residual, work);
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    BiasFragment<Tile, T>::load_and_fill(params.bias, work, params.columns, this->lane,
                                         accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile& next, bool has_next) {
    this->change_source(
        params.residual, params.out, work, next, has_next,
        [&](const Subtile<Tile>& subtile, int j, int half, float2 residual) {
          const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
          return float2{p.x + residual.x, p.y + residual.y};
        },
        [](const Subtile<Tile>&) {});
  }
};

}  // namespace jaxllm::hopper
