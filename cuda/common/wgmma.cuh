// Matrix products of a warpgroup, four warps, on Hopper's tensor cores (wgmma), and the layouts of
// their operands in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/barrier.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

// ---- Registers: a producer warpgroup gives up what the consumer warpgroups need.

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Operands in shared memory, in the 128-byte swizzle: TMA writes it and wgmma reads it.
//
// A tile of 16-bit elements lies there as K-blocks (or MN-blocks) of kSwizzleColumns columns, one
// after the other. A row of a block is 128 bytes, eight chunks of 16 bytes. Chunk c of row r lies
// at c ^ (r % 8), so that the same chunk of eight rows, a swizzle atom, covers all 32 banks:
//
//   row 0   chunk 0 1 2 3 4 5 6 7
//   row 1   chunk 1 0 3 2 5 4 7 6
//   row 2   chunk 2 3 0 1 6 7 4 5     ...
//
// A block begins at a multiple of 1024 bytes, the size of an atom.
inline constexpr int kSwizzleColumns = 64;
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes;

// The bytes from a block's begin to elements `column`, `column` + 1 of a row; column is even.
__host__ __device__ __forceinline__ constexpr uint32_t swizzled_offset(uint32_t row,
                                                                       uint32_t column) {
  const uint32_t chunk = column / 8;
  return row * kSwizzleRowBytes + ((chunk ^ (row % 8)) * 16) + (column % 8) * 2;
}

// The descriptor of an operand; `address` is that of its first element.
__host__ __device__ __forceinline__ constexpr uint64_t smem_descriptor(uint32_t address,
                                                                       uint32_t leading_bytes,
                                                                       uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{stride_bytes >> 4} << 32 | uint64_t{leading_bytes >> 4} << 16 |
         ((address & 0x3ffff) >> 4);
}

// Which side of an operand is contiguous: its depth K, as in q k^T, or its other side, as in v of
// p v.
enum class Major { kK, kMN };

// A K-major operand: a row has 64 of the depth, and rows come in atoms of eight. The next K-step of
// 16 lies kKMajorStepBytes further, within a block. A step is added to the descriptor in units of
// 16 bytes.
__host__ __device__ __forceinline__ constexpr uint64_t k_major_descriptor(uint32_t address) {
  return smem_descriptor(address, 16, kSwizzleAtomBytes);  // the hardware ignores the leading bytes
}
inline constexpr uint32_t kKMajorStepBytes = 16 * 2;

// An MN-major operand: a row has one element of the depth and 64 of the other side, which goes on
// `block_bytes` further. The next K-step lies kMnMajorStepBytes further.
__host__ __device__ __forceinline__ constexpr uint64_t mn_major_descriptor(uint32_t address,
                                                                           uint32_t block_bytes) {
  return smem_descriptor(address, block_bytes, kSwizzleAtomBytes);
}
inline constexpr uint32_t kMnMajorStepBytes = 16 * kSwizzleRowBytes;

// ---- Asynchronous products.

// Before the first product, and after registers that a product uses have been written.
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of the products issued since the last one.
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Keeps the compiler from moving the computation of these registers across this point.
template <int kSize>
__device__ __forceinline__ void warpgroup_fence_operand(float (&accumulator)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(accumulator[i])::"memory");
}

// Waits until at most kPending groups are in flight. The accumulators named are those that are read
// next: no use of them is moved ahead of the wait.
template <int kPending, int... kSizes>
__device__ __forceinline__ void warpgroup_wait(float (&... accumulators)[kSizes]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (warpgroup_fence_operand(accumulators), ...);
}

// An accumulator of 64 x n floats, 4 n / 8 in each thread: element 4 j + i of thread t is in column
// 8 j + 2 (t % 4) + i % 2 and in row accumulator_row(t) + 8 (i / 2).
__host__ __device__ __forceinline__ constexpr int accumulator_row(int thread) {
  return thread / 32 * 16 + thread % 32 / 4;
}
__host__ __device__ __forceinline__ constexpr int accumulator_column(int thread) {
  return 2 * (thread % 4);
}

// An accumulator, rounded, is a left operand as it lies: four registers to a K-step of 16.
template <typename T, int kSize>
__device__ __forceinline__ void pack_accumulator(const float (&accumulator)[kSize],
                                                 uint32_t (&operand)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    operand[i] = pack_pair<T>(accumulator[2 * i], accumulator[2 * i + 1]);
  }
}

// The instruction's text takes each register by name, hence the lists.
#define JAXLLM_FLOATS_8(d, i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAXLLM_FLOATS_32_AT(d, i)                                               \
  JAXLLM_FLOATS_8(d, i), JAXLLM_FLOATS_8(d, i + 8), JAXLLM_FLOATS_8(d, i + 16), \
      JAXLLM_FLOATS_8(d, i + 24)
#define JAXLLM_FLOATS_32(d) JAXLLM_FLOATS_32_AT(d, 0)
#define JAXLLM_FLOATS_40(d) JAXLLM_FLOATS_32(d), JAXLLM_FLOATS_8(d, 32)
#define JAXLLM_FLOATS_48(d) JAXLLM_FLOATS_40(d), JAXLLM_FLOATS_8(d, 40)
#define JAXLLM_FLOATS_64(d) JAXLLM_FLOATS_32(d), JAXLLM_FLOATS_32_AT(d, 32)
#define JAXLLM_FLOATS_96(d) JAXLLM_FLOATS_64(d), JAXLLM_FLOATS_32_AT(d, 64)
#define JAXLLM_FLOATS_128(d) JAXLLM_FLOATS_96(d), JAXLLM_FLOATS_32_AT(d, 96)
#define JAXLLM_NAMES_32                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define JAXLLM_NAMES_40 \
  JAXLLM_NAMES_32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39"
#define JAXLLM_NAMES_48 \
  JAXLLM_NAMES_40       \
  ",%40,%41,%42,%43,%44,%45,%46,%47"
#define JAXLLM_NAMES_64                                                               \
  JAXLLM_NAMES_32                                                                     \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define JAXLLM_NAMES_96                                                               \
  JAXLLM_NAMES_64                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83," \
  "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define JAXLLM_NAMES_128                                                               \
  JAXLLM_NAMES_96                                                                      \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define JAXLLM_WGMMA(n, types) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " "
// Both operands in shared memory.
#define JAXLLM_WGMMA_SS(n, types, names, floats, left, right, scale, major_left, major_right)     \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " scale                                      \
               ", 0;\n" JAXLLM_WGMMA(n, types) "{" names "}, " left ", " right                    \
                                               ", add, 1, 1, " major_left ", " major_right ";\n}" \
               : floats                                                                           \
               : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(kMajorA)),                 \
                 "n"(static_cast<int>(kMajorB)))
// The left operand in registers.
#define JAXLLM_WGMMA_RS(n, types, names, floats, left, right, major_right)                     \
  asm volatile(                                                                                \
      JAXLLM_WGMMA(n, types) "{" names "}, {" left "}, " right ", 1, 1, 1, " major_right ";\n" \
      : floats                                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kMajorB)))

// Both operands in shared memory, 8-bit floats.
#define JAXLLM_WGMMA_FLOAT8(n, types, names, floats, left, right, scale)                           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " scale                                       \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" names "}, " left \
               ", " right ", add, 1, 1;\n}"                                                        \
               : floats                                                                            \
               : "l"(a), "l"(b), "r"(accumulate))

// For each size of an accumulator, the product of either type.
#define JAXLLM_WGMMA_SS_OF(size, n, left, right, scale, major_left, major_right)               \
  if constexpr (kSize == size && std::is_same_v<T, __nv_bfloat16>) {                           \
    JAXLLM_WGMMA_SS(n, "bf16.bf16", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right, \
                    scale, major_left, major_right);                                           \
  } else if constexpr (kSize == size) {                                                        \
    JAXLLM_WGMMA_SS(n, "f16.f16", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right,   \
                    scale, major_left, major_right);                                           \
  }
#define JAXLLM_WGMMA_RS_OF(size, n, left, right, major_right)                                  \
  if constexpr (kSize == size && std::is_same_v<T, __nv_bfloat16>) {                           \
    JAXLLM_WGMMA_RS(n, "bf16.bf16", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right, \
                    major_right);                                                              \
  } else if constexpr (kSize == size) {                                                        \
    JAXLLM_WGMMA_RS(n, "f16.f16", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right,   \
                    major_right);                                                              \
  }

// For each size, the product of each pair of types.
#define JAXLLM_WGMMA_FLOAT8_OF(size, n, left, right, scale)                                        \
  if constexpr (kSize == size && kWideA && kWideB) {                                               \
    JAXLLM_WGMMA_FLOAT8(n, "e5m2.e5m2", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right, \
                        scale);                                                                    \
  } else if constexpr (kSize == size && kWideA) {                                                  \
    JAXLLM_WGMMA_FLOAT8(n, "e5m2.e4m3", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right, \
                        scale);                                                                    \
  } else if constexpr (kSize == size && kWideB) {                                                  \
    JAXLLM_WGMMA_FLOAT8(n, "e4m3.e5m2", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right, \
                        scale);                                                                    \
  } else if constexpr (kSize == size) {                                                            \
    JAXLLM_WGMMA_FLOAT8(n, "e4m3.e4m3", JAXLLM_NAMES_##size, JAXLLM_FLOATS_##size(d), left, right, \
                        scale);                                                                    \
  }

// d = a b, added to d where `accumulate`: 64 x 16 times 16 x n, for n of 64, 80, 96, 128 and 192.
template <typename T, Major kMajorA, Major kMajorB, int kSize>
__device__ __forceinline__ void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kSize == 32 || kSize == 40 || kSize == 48 || kSize == 64 || kSize == 96);
  JAXLLM_WGMMA_SS_OF(32, 64, "%32", "%33", "%34", "%35", "%36")
  JAXLLM_WGMMA_SS_OF(40, 80, "%40", "%41", "%42", "%43", "%44")
  JAXLLM_WGMMA_SS_OF(48, 96, "%48", "%49", "%50", "%51", "%52")
  JAXLLM_WGMMA_SS_OF(64, 128, "%64", "%65", "%66", "%67", "%68")
  JAXLLM_WGMMA_SS_OF(96, 192, "%96", "%97", "%98", "%99", "%100")
}

// d += a b, with a in registers, for n of 64, 96, 128, 192 and 256: see pack_accumulator().
template <typename T, Major kMajorB, int kSize>
__device__ __forceinline__ void wgmma(float (&d)[kSize], const uint32_t* a, uint64_t b) {
  static_assert(kSize == 32 || kSize == 48 || kSize == 64 || kSize == 96 || kSize == 128);
  JAXLLM_WGMMA_RS_OF(32, 64, "%32,%33,%34,%35", "%36", "%37")
  JAXLLM_WGMMA_RS_OF(48, 96, "%48,%49,%50,%51", "%52", "%53")
  JAXLLM_WGMMA_RS_OF(64, 128, "%64,%65,%66,%67", "%68", "%69")
  JAXLLM_WGMMA_RS_OF(96, 192, "%96,%97,%98,%99", "%100", "%101")
  JAXLLM_WGMMA_RS_OF(128, 256, "%128,%129,%130,%131", "%132", "%133")
}

// d = a b of 8-bit floats, added to d where `accumulate`: 64 x 32 times 32 x n, for n of 128 and
// 192. Both operands are K-major, the only layout that there is. A and B are their types.
template <typename A, typename B, int kSize>
__device__ __forceinline__ void wgmma_float8(float (&d)[kSize], uint64_t a, uint64_t b,
                                             int accumulate) {
  static_assert(kSize == 64 || kSize == 96);
  constexpr bool kWideA = std::is_same_v<A, __nv_fp8_e5m2>;
  constexpr bool kWideB = std::is_same_v<B, __nv_fp8_e5m2>;
  JAXLLM_WGMMA_FLOAT8_OF(64, 128, "%64", "%65", "%66")
  JAXLLM_WGMMA_FLOAT8_OF(96, 192, "%96", "%97", "%98")
}

#undef JAXLLM_FLOATS_8
#undef JAXLLM_FLOATS_32_AT
#undef JAXLLM_FLOATS_32
#undef JAXLLM_FLOATS_40
#undef JAXLLM_FLOATS_48
#undef JAXLLM_FLOATS_64
#undef JAXLLM_FLOATS_96
#undef JAXLLM_FLOATS_128
#undef JAXLLM_NAMES_32
#undef JAXLLM_NAMES_40
#undef JAXLLM_NAMES_48
#undef JAXLLM_NAMES_64
#undef JAXLLM_NAMES_96
#undef JAXLLM_NAMES_128
#undef JAXLLM_WGMMA
#undef JAXLLM_WGMMA_SS
#undef JAXLLM_WGMMA_RS
#undef JAXLLM_WGMMA_SS_OF
#undef JAXLLM_WGMMA_RS_OF
#undef JAXLLM_WGMMA_FLOAT8
#undef JAXLLM_WGMMA_FLOAT8_OF

}  // namespace jaxllm::hopper
