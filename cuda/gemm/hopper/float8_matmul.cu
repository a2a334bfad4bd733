#include "common/zero_counter.cuh"
#include "gemm/hopper/epilogue_scaled.cuh"
#include "gemm/hopper/float8_mainloop.cuh"
#include "gemm/hopper/float8_matmul.h"
#include "gemm/hopper/kernel.cuh"

namespace jaxllm {
namespace {

using namespace hopper;

// A consumer has 64 rows, since it needs registers for the sums and the partial sums of as many
// columns. Cooperative, because one consumer adds while the other has the tensor cores.
using DeepTile = GemmTile<192, 4, 2, 1, true, 1, 128>;
// Ping-pong, for a depth of few K-blocks. There the tensor cores add up all of it, or each half,
// and a consumer has registers for 128 rows. In loops of one GEMM on an H200 that took 10 to 16%
// less time than 64 rows and partial sums, for a depth of 768, and 9 to 15% less for 2048. In parts
// of 1024 a depth of 3072 took 2 to 7% less, and one of 4096 as long.
using WholeTile = GemmTile<192, 4, 2, 1, false, 2, 128>;
// For results of so few tiles that the last ones leave most SMs idle, as many weight gradients.
using NarrowTile = GemmTile<128, 5, 2, 1, true, 1, 128>;

// How many columns a cluster computes, tile after tile, where `clusters` run at once.
template <class Tile>
int64_t columns_of_cluster(const GemmShape& shape, int clusters) {
  const int64_t tiles = divide_up(shape.rows, Tile::kBlockM * Tile::kClusterM) *
                        divide_up(shape.columns, Tile::kBlockN * Tile::kClusterN);
  return divide_up(tiles, clusters) * Tile::kBlockN;
}

// A column took 2 to 21% more time with the narrow tile on an H100: a consumer reads more of A and
// B for each product. So it pays where a cluster computes a sixth fewer columns.
bool is_faster_narrow(const GemmShape& shape, int clusters) {
  return 6 * columns_of_cluster<NarrowTile>(shape, clusters) <=
         5 * columns_of_cluster<DeepTile>(shape, clusters);
}

// The least depth that was timed in two halves: 1536 took 14% less time.
constexpr int64_t kLeastHalvesDepth = 1536;

template <class Tile, typename A, typename B, typename Out,
          template <class, typename> class Epilogue>
using ScaledGemm = Gemm<Float8Mainloop<Tile, A, B, Out>, PersistentScheduler, Epilogue>;

// `Whole` and `Halves` are the epilogues where the depth is multiplied at once, and in two halves.
template <template <class, typename> class Whole, template <class, typename> class Halves,
          typename A, typename B, typename Out>
cudaError_t launch(cudaStream_t stream, const Float8Gemm<A, B, Out>& gemm, const GemmShape& shape,
                   Out* out, Amax amax) {
  if (shape.rows == 0 || shape.columns == 0) return cudaSuccess;
  if (shape.columns % 8 != 0) return cudaErrorNotSupported;
  const auto run = [&](auto of_tile) {
    return launch_gemm<decltype(of_tile), uint8_t>(stream, shape,
                                                   reinterpret_cast<const uint8_t*>(gemm.a),
                                                   reinterpret_cast<const uint8_t*>(gemm.b),
                                                   {out,
                                                    {gemm.scale_a, gemm.has_one_scale_a},
                                                    {gemm.scale_b, gemm.has_one_scale_b},
                                                    gemm.bias,
                                                    amax});
  };
  using Deep = ScaledGemm<DeepTile, A, B, Out, Whole>;
  if constexpr (std::is_same_v<A, __nv_fp8_e5m2> && std::is_same_v<B, A>) {
    return run(Deep{});  // no layer has two such operands
  } else {
    if (shape.depth <= kWholeDepth) return run(ScaledGemm<WholeTile, A, B, Out, Whole>{});
    int clusters = 0;
    JAXLLM_RETURN_IF_ERROR(find_clusters<Deep>(&clusters));
    if (is_faster_narrow(shape, clusters)) return run(ScaledGemm<NarrowTile, A, B, Out, Whole>{});
    if constexpr (sizeof(Out) == 2) {
      if (kLeastHalvesDepth <= shape.depth && shape.depth <= 2 * kWholeDepth) {
        return run(ScaledGemm<WholeTile, A, B, Out, Halves>{});
      }
    }
    return run(Deep{});
  }
}

}  // namespace

template <typename A, typename B, typename Out>
cudaError_t float8_matmul(cudaStream_t stream, const Float8Gemm<A, B, Out>& gemm,
                          const GemmShape& shape, Out* out) {
  return launch<EpilogueScaled, EpilogueScaledHalves>(stream, gemm, shape, out, {});
}

template <typename Out>
cudaError_t float8_matmul_amax(cudaStream_t stream,
                               const Float8Gemm<__nv_fp8_e4m3, __nv_fp8_e4m3, Out>& gemm,
                               const GemmShape& shape, Out* out, float* amax, int parts) {
  if (!gemm.has_one_scale_a || !gemm.has_one_scale_b ||
      (parts > 1 && shape.columns % (parts * int64_t{kSwizzleColumns}) != 0)) {
    return cudaErrorNotSupported;
  }
  JAXLLM_RETURN_IF_ERROR(zero_counter(stream, amax, parts));
  return launch<EpilogueScaledAmax, EpilogueScaledHalvesAmax>(stream, gemm, shape, out,
                                                              {amax, shape.columns / parts});
}

#define JAXLLM_FLOAT8_MATMUL(A, B, Out)                                                            \
  template cudaError_t float8_matmul(cudaStream_t, const Float8Gemm<A, B, Out>&, const GemmShape&, \
                                     Out*);
#define JAXLLM_FLOAT8_MATMULS(Out)                                                              \
  JAXLLM_FLOAT8_MATMUL(__nv_fp8_e4m3, __nv_fp8_e4m3, Out)                                       \
  JAXLLM_FLOAT8_MATMUL(__nv_fp8_e4m3, __nv_fp8_e5m2, Out)                                       \
  JAXLLM_FLOAT8_MATMUL(__nv_fp8_e5m2, __nv_fp8_e4m3, Out)                                       \
  JAXLLM_FLOAT8_MATMUL(__nv_fp8_e5m2, __nv_fp8_e5m2, Out)                                       \
  template cudaError_t float8_matmul_amax(cudaStream_t,                                         \
                                          const Float8Gemm<__nv_fp8_e4m3, __nv_fp8_e4m3, Out>&, \
                                          const GemmShape&, Out*, float*, int);
JAXLLM_FLOAT8_MATMULS(__nv_bfloat16)
JAXLLM_FLOAT8_MATMULS(__half)
JAXLLM_FLOAT8_MATMULS(float)
#undef JAXLLM_FLOAT8_MATMULS
#undef JAXLLM_FLOAT8_MATMUL

}  // namespace jaxllm
