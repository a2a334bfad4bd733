// The order of query heads that share key heads.
#pragma once

namespace jaxllm {

// Query head n reads key head n / group. In parts stand the first query of each of the `kv_heads`
// key heads, then the second of each, and so on; a group of 1 stands for the usual order too.
struct HeadOrder {
  int group, kv_heads;

  // Where query head n stands.
  __host__ __device__ __forceinline__ int place(int head) const {
    if (group == 1) return head;
    const int key_head = head / group;
    return (head - key_head * group) * kv_heads + key_head;
  }
};

}  // namespace jaxllm
