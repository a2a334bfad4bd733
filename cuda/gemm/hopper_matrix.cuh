// What the Hopper matrix products need beyond common/hopper.cuh: a wider product of a warpgroup,
// boxes of matrices, and clusters, whose blocks share what they copy.
#pragma once

#include "common/hopper.cuh"

namespace jaxllm::hopper {

// ---- Clusters: neighbouring blocks that reach each other's shared memory.

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier that lies where `barrier` does, in the cluster's block `rank`.
__device__ __forceinline__ void arrive_at(const Barrier& barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier.address()),
      "r"(rank)
      : "memory");
}

// ---- Boxes of a matrix.

// Copies a box, whose first element is at `column` and `row`, into shared memory; its bytes arrive
// at the barrier.
__device__ __forceinline__ void load_matrix_box(void* target, const CUtensorMap& map, int column,
                                                int row, const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(target)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row)
      : "memory");
}

// The same into the blocks of the cluster whose bits `blocks` has, in each to the same place and
// with the same barrier.
__device__ __forceinline__ void load_matrix_box(void* target, const CUtensorMap& map, int column,
                                                int row, const Barrier& barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(target)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void store_matrix_box(const CUtensorMap& map, const void* source,
                                                 int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
      "r"(shared_address(source)), "r"(column), "r"(row)
      : "memory");
}

// Waits until all but the last kPending groups of this thread's stores have read their source.
template <int kPending>
__device__ __forceinline__ void wait_until_older_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- Products: as multiply() in common/hopper.cuh, 64 x 16 times 16 x 192.

#define JAXLLM_FLOATS_8(d, i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAXLLM_FLOATS_32(d, i)                                                  \
  JAXLLM_FLOATS_8(d, i), JAXLLM_FLOATS_8(d, i + 8), JAXLLM_FLOATS_8(d, i + 16), \
      JAXLLM_FLOATS_8(d, i + 24)
#define JAXLLM_NAMES_96                                                                      \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"   \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
  "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67," \
  "%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
  "%90,%91,%92,%93,%94,%95"
#define JAXLLM_WGMMA(n, types, names, floats, left, right, scale, turn_left, turn_right)           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " scale                                       \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " {" names "}, " left \
               ", " right ", add, 1, 1, " turn_left ", " turn_right ";\n}"                         \
               : floats                                                                            \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTurnA), "n"(kTurnB))

template <typename T, int kTurnA, int kTurnB>
__device__ __forceinline__ void multiply(float (&d)[96], uint64_t a, uint64_t b, int accumulate) {
#define JAXLLM_FLOATS JAXLLM_FLOATS_32(d, 0), JAXLLM_FLOATS_32(d, 32), JAXLLM_FLOATS_32(d, 64)
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXLLM_WGMMA(192, "bf16.bf16", JAXLLM_NAMES_96, JAXLLM_FLOATS, "%96", "%97", "%98", "%99",
                 "%100");
  } else {
    JAXLLM_WGMMA(192, "f16.f16", JAXLLM_NAMES_96, JAXLLM_FLOATS, "%96", "%97", "%98", "%99",
                 "%100");
  }
#undef JAXLLM_FLOATS
}

#undef JAXLLM_FLOATS_8
#undef JAXLLM_FLOATS_32
#undef JAXLLM_NAMES_96
#undef JAXLLM_WGMMA

}  // namespace jaxllm::hopper
