// What Hopper (sm_90a) adds, one thin function an instruction: barriers in shared memory
// (mbarrier), the copy engine (TMA), products by a group of four warps (wgmma), registers that
// change hands.
//
// Two kinds of access meet in shared memory. Threads load and store through the generic proxy; the
// copy engine and the tensor cores go through the async proxy, which does not see what a thread has
// stored until that thread fences (fence_async_proxy) and then meets the user at a barrier.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/fast_math.cuh"

namespace jaxllm::hopper {

inline constexpr int kWarpgroup = 128;  // threads

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers in shared memory.

// Completes a phase when `count` arrivals, and the bytes that one of them announced, have come. A
// waiter names the phase by its parity: a fresh barrier is in phase 0, and counts as having
// completed the phase before it, of parity 1.
class Barrier {
 public:
  __device__ __forceinline__ void init(uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives, and makes the phase wait for `bytes` from the copy engine.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  __device__ __forceinline__ void wait(uint32_t parity) {
    // A loop within the statement: the compiler sees no branch between the products in flight.
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(address()),
        "r"(parity)
        : "memory");
  }

  __device__ __forceinline__ uint32_t address() const { return shared_address(this); }

 private:
  uint64_t state_;
};

// Arrives for a whole warp, by its first lane. To compute-sanitizer's racecheck that is the lane's
// word alone: where threads and the copy engine write by turns, each thread arrives for itself.
__device__ __forceinline__ void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// Where a user of a ring of buffers stands: the buffer, and the parity of its present phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// After the barriers' init, before the block's threads synchronise: the copy engine sees them too.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Barriers of a part of the block, by number (0 is __syncthreads'). `threads` counts those that
// wait and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Fences between the proxies.

// What this thread stored to shared memory is seen by later products and copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory, in both directions.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- Registers: a warpgroup that only copies gives up what those that multiply need.

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- The copy engine. One thread issues a copy.

// Coordinates of a box: column, head, token, sequence (see common/tensor_map.h).
struct Box {
  int column, head, token, sequence;
};

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box into shared memory; its bytes arrive at the barrier.
__device__ __forceinline__ void load_box(void* target, const CUtensorMap& map, const Box& box,
                                         const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(target)),
      "l"(&map), "r"(barrier.address()), "r"(box.column), "r"(box.head), "r"(box.token),
      "r"(box.sequence)
      : "memory");
}

// Copies consecutive bytes, a multiple of 16, into shared memory.
__device__ __forceinline__ void load_bytes(void* target, const void* source, uint32_t bytes,
                                           const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(source), "r"(bytes), "r"(barrier.address())
      : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* source,
                                          const Box& box) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(source)), "r"(box.column), "r"(box.head), "r"(box.token), "r"(box.sequence)
      : "memory");
}

__device__ __forceinline__ void store_bytes(void* target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

// Adds consecutive floats to those in global memory.
__device__ __forceinline__ void add_floats(float* target, const float* source, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
      "r"(shared_address(source)), "r"(bytes)
      : "memory");
}

// Closes the group of the stores that this thread has issued since the last one.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all stores of this thread have read their source, which may then be overwritten.
__device__ __forceinline__ void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until all stores of this thread are done.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- Swizzled tiles.

// A tile of `rows` x width elements of 16 bits lies in shared memory as slabs of kSlabWidth
// columns; a slab's rows are 128 bytes long, and in row r the 16-byte chunk c lies at c ^ (r % 8),
// so that eight rows of a column of chunks lie in different banks. So the copy engine writes a box
// (128-byte swizzle), and so the tensor cores read it. A slab begins at a multiple of 1024 bytes.
inline constexpr int kSlabWidth = 64;
inline constexpr int kSlabRowBytes = 128;
inline constexpr int kEightRowsBytes = 8 * kSlabRowBytes;

// The bytes from a slab's begin to elements `column`, `column` + 1 of a row; column is even.
__host__ __device__ __forceinline__ constexpr uint32_t slab_offset(uint32_t row, uint32_t column) {
  const uint32_t chunk = column / 8;
  return row * kSlabRowBytes + ((chunk ^ (row % 8)) * 16) + (column % 8) * 2;
}

// Where an operand lies; `address` is that of its first element.
__host__ __device__ __forceinline__ constexpr uint64_t descriptor(uint32_t address,
                                                                  uint32_t leading_bytes,
                                                                  uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{stride_bytes >> 4} << 32 | uint64_t{leading_bytes >> 4} << 16 |
         ((address & 0x3ffff) >> 4);
}

// Depth along the rows, as in q k^T: the 16 elements of a product's depth are consecutive, and the
// operand's rows come in groups of eight. The next 16 lie kDepthStepAlongRows further, but for the
// next slab. A step is added to the descriptor in units of 16 bytes.
__host__ __device__ __forceinline__ constexpr uint64_t depth_along_rows(uint32_t address) {
  return descriptor(address, 16, kEightRowsBytes);  // the hardware ignores the leading bytes
}
inline constexpr uint32_t kDepthStepAlongRows = 16 * 2;

// Depth across the rows, as in v of p v: each row holds one element of the depth and kSlabWidth of
// the operand's other side, which goes on `slab_bytes` further. The next 16 of the depth lie
// kDepthStepAcrossRows further.
__host__ __device__ __forceinline__ constexpr uint64_t depth_across_rows(uint32_t address,
                                                                         uint32_t slab_bytes) {
  return descriptor(address, slab_bytes, kEightRowsBytes);
}
inline constexpr uint32_t kDepthStepAcrossRows = 16 * kSlabRowBytes;

// ---- Products of a warpgroup.

// Before the first product, and after registers that a product uses have been written.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of the products issued since the last one.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The values are computed here: not after the next wait, as the compiler might find as good.
template <int kSize>
__device__ __forceinline__ void pin(float (&accumulator)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(accumulator[i])::"memory");
}

// Waits until at most kPending groups are in flight. The accumulators named are those that are read
// next: no use of them is moved ahead of the wait.
template <int kPending, int... kSizes>
__device__ __forceinline__ void wait_for_products(float (&... accumulators)[kSizes]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(accumulators), ...);
}

// An accumulator of 64 x n floats, 4 n / 8 in each thread: element 4 j + i of thread t is in column
// 8 j + 2 (t % 4) + i % 2 and in row accumulator_row(t) + 8 (i / 2).
__host__ __device__ __forceinline__ constexpr int accumulator_row(int thread) {
  return thread / 32 * 16 + thread % 32 / 4;
}
__host__ __device__ __forceinline__ constexpr int accumulator_column(int thread) {
  return 2 * (thread % 4);
}

// ---- Matrices of 8 x 8 numbers of 16 bits, four at once. A lane names a row of one of them, 16
// bytes of shared memory, and has of each the word that an accumulator's layout gives it.

__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Two floats as a register of an operand; the first is in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// And the two floats of such a register.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
}

// An accumulator, rounded, is a left operand as it lies: four registers to 16 of the depth.
template <typename T, int kSize>
__device__ __forceinline__ void pack(const float (&accumulator)[kSize],
                                     uint32_t (&operand)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    operand[i] = pack<T>(accumulator[2 * i], accumulator[2 * i + 1]);
  }
}

// The instruction's text takes each register by name, hence the lists.
#define JAXLLM_FLOATS_8(d, i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAXLLM_FLOATS_32(d, i)                                                  \
  JAXLLM_FLOATS_8(d, i), JAXLLM_FLOATS_8(d, i + 8), JAXLLM_FLOATS_8(d, i + 16), \
      JAXLLM_FLOATS_8(d, i + 24)
#define JAXLLM_FLOATS_64(d, i) JAXLLM_FLOATS_32(d, i), JAXLLM_FLOATS_32(d, i + 32)
#define JAXLLM_NAMES_32                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define JAXLLM_NAMES_64                                                                       \
  JAXLLM_NAMES_32                                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
  "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define JAXLLM_WGMMA(n, types) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " "
// Both operands in shared memory.
#define JAXLLM_WGMMA_SHARED(n, types, names, floats, left, right, scale, turn_left, turn_right) \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " scale                                    \
               ", 0;\n" JAXLLM_WGMMA(n, types) "{" names "}, " left ", " right                  \
                                               ", add, 1, 1, " turn_left ", " turn_right ";\n}" \
               : floats                                                                         \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTurnA), "n"(kTurnB))
// The left operand in registers.
#define JAXLLM_WGMMA_REGISTERS(n, types, names, floats, left, right, turn_right)                 \
  asm volatile(JAXLLM_WGMMA(n, types) "{" names "}, {" left "}, " right ", 1, 1, 1, " turn_right \
                                      ";\n"                                                      \
               : floats                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTurnB))

// d = a b, added to d where `accumulate`: 64 x 16 times 16 x n. kTurnA, kTurnB: the operand's depth
// is across the rows.
template <typename T, int kTurnA, int kTurnB>
__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXLLM_WGMMA_SHARED(64, "bf16.bf16", JAXLLM_NAMES_32, JAXLLM_FLOATS_32(d, 0), "%32", "%33",
                        "%34", "%35", "%36");
  } else {
    JAXLLM_WGMMA_SHARED(64, "f16.f16", JAXLLM_NAMES_32, JAXLLM_FLOATS_32(d, 0), "%32", "%33", "%34",
                        "%35", "%36");
  }
}

template <typename T, int kTurnA, int kTurnB>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXLLM_WGMMA_SHARED(128, "bf16.bf16", JAXLLM_NAMES_64, JAXLLM_FLOATS_64(d, 0), "%64", "%65",
                        "%66", "%67", "%68");
  } else {
    JAXLLM_WGMMA_SHARED(128, "f16.f16", JAXLLM_NAMES_64, JAXLLM_FLOATS_64(d, 0), "%64", "%65",
                        "%66", "%67", "%68");
  }
}

// d += a b, with a in registers: see pack().
template <typename T, int kTurnB>
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXLLM_WGMMA_REGISTERS(64, "bf16.bf16", JAXLLM_NAMES_32, JAXLLM_FLOATS_32(d, 0),
                           "%32,%33,%34,%35", "%36", "%37");
  } else {
    JAXLLM_WGMMA_REGISTERS(64, "f16.f16", JAXLLM_NAMES_32, JAXLLM_FLOATS_32(d, 0),
                           "%32,%33,%34,%35", "%36", "%37");
  }
}

template <typename T, int kTurnB>
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXLLM_WGMMA_REGISTERS(128, "bf16.bf16", JAXLLM_NAMES_64, JAXLLM_FLOATS_64(d, 0),
                           "%64,%65,%66,%67", "%68", "%69");
  } else {
    JAXLLM_WGMMA_REGISTERS(128, "f16.f16", JAXLLM_NAMES_64, JAXLLM_FLOATS_64(d, 0),
                           "%64,%65,%66,%67", "%68", "%69");
  }
}

#undef JAXLLM_FLOATS_8
#undef JAXLLM_FLOATS_32
#undef JAXLLM_FLOATS_64
#undef JAXLLM_NAMES_32
#undef JAXLLM_NAMES_64
#undef JAXLLM_WGMMA
#undef JAXLLM_WGMMA_SHARED
#undef JAXLLM_WGMMA_REGISTERS

}  // namespace jaxllm::hopper
