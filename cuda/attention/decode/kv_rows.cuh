// Where the keys and values of a sequence's tokens are in a cache.
//
//   in one piece   (batch, length): the tokens of a sequence are neighbours
//   in pages       a pool (pages, page): token t is row t % page of page table[t / page]
//
// A row has the keys, or the values, of all key heads of a token.
#pragma once

#include <cstdint>

#include "common/divisor.cuh"

namespace jaxllm::decode {

// The pages of a call. Sequences of a group share a pool.
struct Pages {
  const int32_t* table = nullptr;  // of each sequence `entries` pages; nullptr if in one piece
  int entries = 0, pages = 0;      // of a sequence, and of a pool
  Divisor page;                    // the tokens of a page
  int group = 1;                   // sequences of a pool
};

template <bool kPaged>
class KvRows;

template <>
class KvRows<false> {
 public:
  template <class Params>
  __device__ __forceinline__ KvRows(const Params& params, int sequence)
      : first_(int64_t{sequence} * params.length) {}

  // The row of token 0, and from there the row of another.
  __device__ __forceinline__ int64_t first() const { return first_; }
  __device__ __forceinline__ uint32_t operator()(uint32_t token) const { return token; }

 private:
  int64_t first_;
};

template <>
class KvRows<true> {
 public:
  template <class Params>
  __device__ __forceinline__ KvRows(const Params& params, int sequence)
      : pages_(params.pages),
        table_(params.pages.table + int64_t{sequence} * params.pages.entries),
        first_(int64_t{sequence / params.pages.group} * params.pages.pages *
               params.pages.page.value()) {}

  // The first row of the pool, and from there the row of a token. Of a token past the sequence's
  // the row is any of the pool: its entry of the table may be anything.
  __device__ __forceinline__ int64_t first() const { return first_; }
  __device__ __forceinline__ uint64_t operator()(uint32_t token) const {
    const int entry = min(static_cast<int>(pages_.page.quotient(token)), pages_.entries - 1);
    const uint32_t slot = token - entry * pages_.page.value();
    const int page = min(max(__ldg(table_ + entry), 0), pages_.pages - 1);
    return uint64_t(page) * pages_.page.value() + min(slot, pages_.page.value() - 1);
  }

 private:
  const Pages& pages_;
  const int32_t* table_;
  int64_t first_;
};

// Of either, by a branch: for kernels that need not be fast.
class EitherKvRows {
 public:
  template <class Params>
  __device__ __forceinline__ EitherKvRows(const Params& params, int sequence)
      : is_paged_(params.pages.table != nullptr),
        in_one_piece_(params, sequence),
        in_pages_(params, sequence) {}

  // The row of a token, from the first of the cache or pool.
  __device__ __forceinline__ int64_t operator()(uint32_t token) const {
    return is_paged_ ? in_pages_.first() + static_cast<int64_t>(in_pages_(token))
                     : in_one_piece_.first() + token;
  }

 private:
  bool is_paged_;
  KvRows<false> in_one_piece_;
  KvRows<true> in_pages_;
};

}  // namespace jaxllm::decode
