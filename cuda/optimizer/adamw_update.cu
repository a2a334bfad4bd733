#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/vector.cuh"
#include "optimizer/adamw_update.h"
#include "optimizer/leaves.cuh"
#include "optimizer/quad.cuh"

namespace jaxllm {
namespace {

// A thread has four elements of a leaf. CTAs are as small as they can be without a loss: the next
// begins as soon as one is finished.
constexpr int kThreads = 128;
constexpr int kElements = kThreads * 4;

// A hash of seed and position, the same as in reference.py.
__device__ __forceinline__ uint32_t random_bits(uint32_t position, uint32_t seed) {
  uint32_t bits = position + seed;
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// How results are rounded to T: to nearest, or stochastically to bfloat16.
struct Rounding {
  bool is_random;
  uint32_t seed;

  template <typename T>
  __device__ __forceinline__ T round(float x, int64_t position) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (is_random && !isnan(x)) {
        // A bfloat16 is the upper half of a float. A random number added to the lower half carries
        // into it with a probability equal to the fraction that is cut off.
        const uint32_t low = random_bits(static_cast<uint32_t>(position), seed) & 0xffffu;
        return __ushort_as_bfloat16(static_cast<unsigned short>((__float_as_uint(x) + low) >> 16));
      }
    }
    return from_float<T>(x);
  }
};

struct Scalars {
  float lr, m_correction, v_correction, grad_scale, skip;
};

// Updates one element.
__device__ __forceinline__ void update(float& param, float grad, float& m, float& v,
                                       const Scalars& scalars, const AdamWConstants& constants,
                                       float weight_decay) {
  if (scalars.skip != 0.0f) return;
  grad *= scalars.grad_scale;
  m = constants.b1 * m + constants.one_minus_b1 * grad;
  v = constants.b2 * v + constants.one_minus_b2 * grad * grad;
  const float step = m * scalars.m_correction / (sqrtf(v * scalars.v_correction) + constants.eps);
  param -= scalars.lr * (step + weight_decay * param);
}

template <typename P, typename G, typename C>
__global__ void __launch_bounds__(kThreads)
    adamw_update_kernel(const __grid_constant__ LeafTable<AdamWLeaf> table, const float* scalars,
                        const uint32_t* seeds, int64_t seed_count, AdamWConstants constants) {
  const int index = table.find(blockIdx.x);
  const AdamWLeaf& leaf = table.leaves[index];
  const int64_t size = leaf.size, offset = blockIdx.y * size;
  P* const param = static_cast<P*>(leaf.param) + offset;
  const G* const grad = static_cast<const G*>(leaf.grad) + offset;
  float* const m = leaf.m + offset;
  float* const v = leaf.v + offset;
  C* const copy = leaf.copy ? static_cast<C*>(leaf.copy) + offset : nullptr;

  scalars += blockIdx.y * kAdamWScalars;
  const Scalars my_scalars{scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]};
  const Rounding rounding{seeds != nullptr,
                          seeds ? seeds[blockIdx.y * seed_count + leaf.seed] : 0u};
  const int64_t first = int64_t{blockIdx.x - table.first_ctas[index]} * kElements;

  if (first + kElements <= size && quads_are_aligned(param, grad, m, v, copy)) {
    const int64_t i = first + threadIdx.x * 4;
    Quad<P> params = load_quad(param + i);
    const Quad<G> grads = load_quad(grad + i);
    Quad<float> ms = load_quad(m + i), vs = load_quad(v + i);
    Quad<C> copies;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float value = to_float(params.elements[k]);
      update(value, to_float(grads.elements[k]), ms.elements[k], vs.elements[k], my_scalars,
             constants, leaf.weight_decay);
      params.elements[k] = rounding.round<P>(value, i + k);
      if (copy) copies.elements[k] = rounding.round<C>(value, i + k);
    }
    store_quad(param + i, params);
    store_quad(m + i, ms);
    store_quad(v + i, vs);
    if (copy) store_quad(copy + i, copies);
    return;
  }
  // The last CTA of a leaf, and leaves that are not aligned: one element at a time.
  const int64_t end = min(first + kElements, size);
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
    float value = to_float(param[i]);
    update(value, to_float(grad[i]), m[i], v[i], my_scalars, constants, leaf.weight_decay);
    param[i] = rounding.round<P>(value, i);
    if (copy) copy[i] = rounding.round<C>(value, i);
  }
}

}  // namespace

template <typename P, typename G, typename C>
cudaError_t AdamW<P, G, C>::update(cudaStream_t stream, const std::vector<AdamWLeaf>& leaves,
                                   const float* scalars, const uint32_t* seeds, int64_t seed_count,
                                   AdamWConstants constants, int64_t groups) {
  if (groups == 0) return cudaSuccess;
  return launch_tables(leaves, kElements, [&](const LeafTable<AdamWLeaf>& table, int64_t ctas) {
    return launch_kernel(stream, adamw_update_kernel<P, G, C>, {dim3(ctas, groups), kThreads},
                         table, scalars, seeds, seed_count, constants);
  });
}

template struct AdamW<float, float, __nv_bfloat16>;
template struct AdamW<float, float, __half>;
template struct AdamW<float, __nv_bfloat16, __nv_bfloat16>;
template struct AdamW<float, __nv_bfloat16, __half>;
template struct AdamW<float, __half, __nv_bfloat16>;
template struct AdamW<float, __half, __half>;
template struct AdamW<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>;
template struct AdamW<__nv_bfloat16, float, __nv_bfloat16>;
template struct AdamW<__half, __half, __half>;
template struct AdamW<__half, float, __half>;

}  // namespace jaxllm
