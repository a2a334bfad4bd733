// The forward's mainloop: the producer loads Q, K and V, and each consumer computes 64 rows of
//
//   s = q k^T      p = softmax so far      o += p v
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/hopper/forward_traits.cuh"
#include "attention/hopper/mask.cuh"
#include "attention/hopper/softmax.cuh"
#include "common/tma.cuh"

namespace jaxllm::hopper {

// The producer's part: one thread.
template <typename T, class Traits>
struct ForwardProducer {
  using Smem = ForwardSmem<T, Traits>;

  Smem& smem;
  const CUtensorMap &q_map, &k_map, &v_map;
  PipelineState<1> q_state = {};
  PipelineState<Traits::kStages> k_state = {}, v_state = {};

  // A tile of K or of V, which has kSize elements.
  template <int kSize>
  __device__ __forceinline__ static void load_kv(Pipeline<Traits::kStages>& pipeline,
                                                 PipelineState<Traits::kStages>& state,
                                                 T (*stages)[kSize], const CUtensorMap& map,
                                                 int kv_head, int key_tile, int sequence) {
    const Barrier& full = pipeline.producer_acquire(state, kSize * sizeof(T));
    for (int block = 0; block < kSize / (Traits::kBlockN * kSwizzleColumns); ++block) {
      tma_load_4d(stages[state.stage] + block * Traits::kBlockN * kSwizzleColumns, map,
                  {block * kSwizzleColumns, kv_head, key_tile * Traits::kBlockN, sequence}, full);
    }
    state.advance();
  }

  __device__ __forceinline__ void load_q(const ForwardWorkTile& work, const TileRange& key_tiles,
                                         int q_place) {
    smem.q_pipeline.producer_acquire(q_state);
    smem.work = work;
    smem.key_tiles = key_tiles;
    Barrier& full = smem.q_pipeline.full[0];
    full.arrive_and_expect(Traits::kBlockM * Traits::kColumns * sizeof(T));
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      for (int block = 0; block < Traits::kColumnBlocks; ++block) {
        tma_load_4d(smem.q[consumer] + block * 64 * kSwizzleColumns, q_map,
                    {block * kSwizzleColumns, q_place,
                     work.query_tile * Traits::kBlockM + consumer * 64, work.sequence},
                    full);
      }
    }
    q_state.advance();
  }

  // Loads what a work tile needs, in the order in which consumers use it: the scores are a tile
  // ahead. q_place is where its head stands in Q.
  __device__ __forceinline__ void load(const ForwardWorkTile& work, const TileRange& key_tiles,
                                       int kv_head, int q_place) {
    const auto load_k = [&](int tile) {
      load_kv(smem.k_pipeline, k_state, smem.k, k_map, kv_head, tile, work.sequence);
    };
    const auto load_v = [&](int tile) {
      load_kv(smem.v_pipeline, v_state, smem.v, v_map, kv_head, tile, work.sequence);
    };
    if (key_tiles.size() > 0) load_k(key_tiles.end - 1);
    load_q(work, key_tiles, q_place);
#pragma unroll 1
    for (int left = key_tiles.size(); left > 0; --left) {
      if (left > 1) load_k(key_tiles.begin + left - 2);
      load_v(key_tiles.begin + left - 1);
    }
  }

  // Tells the consumers that there is no more work.
  __device__ __forceinline__ void load_tail() {
    smem.q_pipeline.producer_acquire(q_state);
    smem.work.query_tile = -1;
    smem.q_pipeline.full[0].arrive();
  }
};

// Of the key tiles that a CTA visits, those that the 64 queries from `first_query` on see; an empty
// range ends with them.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ TileRange consumer_key_tiles(const TiledMask<kBlockM, kBlockN>& mask,
                                                        const TileRange& all, int first_query) {
  const TileRange nothing{all.end, all.end};
  if (all.size() == 0 || first_query >= mask.queries) return nothing;
  const TileRange own =
      intersect(all, TiledMask<64, kBlockN>(mask).visible_key_tiles(first_query / 64));
  return own.size() > 0 ? own : nothing;
}

// A consumer warpgroup's part.
template <typename T, class Traits, bool kSegments, bool kSoftcap>
class ForwardConsumer {
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kColumnBlockBytes = kBlockN * kSwizzleRowBytes;
  static constexpr bool kKeepsMax = std::is_same_v<T, __nv_bfloat16>;

 public:
  using Smem = ForwardSmem<T, Traits>;
  using Mask = TiledMask<Traits::kBlockM, kBlockN>;
  using State = PipelineState<Traits::kStages>;
  using Softmax = OnlineSoftmax<T, kBlockN, kValueDim>;

  __device__ __forceinline__ ForwardConsumer(Smem& smem, const ForwardParams& params, int consumer)
      : smem_(smem),
        params_(params),
        consumer_(consumer),
        next_consumer_(consumer + 1 == Traits::kConsumers ? 0 : consumer + 1),
        scale_log2_(params.scale * float{M_LOG2E}),
        q_operand_(k_major_descriptor(smem_address(smem.q[consumer]))) {}

  // The first consumer has the tensor cores first.
  __device__ __forceinline__ void mma_init() {
    if (next_consumer_ == 0) order_barrier_arrive();
  }
  // No consumer exits with the order barrier in the middle of a phase.
  __device__ __forceinline__ void mma_tail() {
    if (consumer_ == 0) order_barrier_wait();
  }

  // The output of the consumer's 64 queries, not yet divided by the softmax's sums. `key_tiles` is
  // what the CTA visits.
  __device__ __forceinline__ void mma(const Mask& mask, const ForwardWorkTile& work,
                                      const TileRange& key_tiles, int first_query, State& k_state,
                                      State& v_state, Softmax& softmax, float (&o)[kValueDim / 2]) {
    const TileRange own = consumer_key_tiles(mask, key_tiles, first_query);
    ScoreMask<Rows::kQueries, kSegments, Traits::kBlockM, kBlockN> score_mask(
        params_.segments, mask, work.sequence, first_query);
    float s[kBlockN / 2];
    uint32_t p[kBlockN / 4];
    // Of a tile of scores the softmax takes the maxima while the wgmma of the output still read p
    // of the tile before. What a softcap needs takes as long as these wgmma. So then the weights
    // are computed beside them too, in the registers of the scores, and rounded to p when they are
    // done.
    [[maybe_unused]] const bool is_bounded = kKeepsMax && params_.softcap.is_bounded;
    const auto start_softmax = [&](int key_tile, auto is_first_tile) {
      constexpr bool kIsFirst = decltype(is_first_tile)::value;
      const int first_key = key_tile * kBlockN;
      if constexpr (!kSoftcap) {
        score_mask.apply(s, key_tile, first_key);
        if (kIsFirst || !kKeepsMax) softmax.update_max(s, scale_log2_);
      } else {
        const Softcap& softcap = params_.softcap;
        const float squares = bound_squares(s);
        // A hidden score, -inf, is none for a polynomial.
        if (!kIsFirst && is_bounded && squares <= softcap.square_limit &&
            score_mask.template hides_none<kBlockN>(key_tile, first_key)) {
          const auto exponentiate = [&](const auto& coefficients) {
            softmax.exponentiate_in_place(s, [&](float s, int row) {
              return fmaf(s, polynomial_of_square(s, coefficients), -softmax.scaled_max[row]);
            });
          };
          if (squares <= softcap.short_square_limit) {
            exponentiate(softcap.short_log2_coefficients);
          } else {
            exponentiate(softcap.log2_coefficients);
          }
          return;
        }
        cap_scores(s, softcap, squares);
        score_mask.apply(s, key_tile, first_key);
        if (kIsFirst || !is_bounded) softmax.update_max(s, scale_log2_);
        if (kIsFirst && is_bounded) softmax.keep_max(softcap.least_max, scale_log2_);
        softmax.exponentiate_in_place(
            s, [&](float s, int row) { return fmaf(s, scale_log2_, -softmax.scaled_max[row]); });
      }
    };
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) o[i] = 0.0f;

    for (int i = own.end; i < key_tiles.end; ++i) skip_key_tile(k_state, v_state, true);
    const bool is_idle = own.size() == 0;
    if (is_idle) {
      release_q();
    } else {
      int key_tile = own.end - 1;
      start_scores(k_state, s);
      warpgroup_wait<0>(s);
      release_k(k_state);
      start_softmax(key_tile, std::true_type{});
      // The loop ends between the maxima and the wait for the wgmma beside them: within one basic
      // block the assembler would put the wait first.
      bool is_first = true;
      for (;;) {
        warpgroup_wait<0>(o, s);
        if (key_tile < own.end - 1) release_v(v_state);
        if constexpr (kSoftcap) {
          if (!is_bounded) softmax.rescale_output(o);
          Softmax::pack(s, p);
        } else if (!kKeepsMax) {
          softmax.next(s, scale_log2_, p, o);
        } else if (is_first) {
          softmax.template exponentiate<false>(s, scale_log2_, p, o, softmax.row_sum);
          is_first = false;
        } else {
          softmax.next_with_old_max(s, scale_log2_, p, o);
        }
        if (key_tile == own.begin) break;

        --key_tile;
        order_barrier_wait();
        start_scores(k_state, s);
        start_output(v_state, p, o);
        order_barrier_arrive();
        warpgroup_wait<1>(s);
        release_k(k_state);
        start_softmax(key_tile, std::false_type{});
        warpgroup_fence_operand(s);
      }
      release_q();
      start_output(v_state, p, o);
      warpgroup_wait<0>(o);
      release_v(v_state);
    }
    // Every consumer passes the order barrier as often: once less than there are key tiles.
    for (int i = own.begin; i > key_tiles.begin; --i) {
      skip_key_tile(k_state, v_state, !is_idle || i > key_tiles.begin + 1);
    }
  }

 private:
  static constexpr int kOrderThreads = 2 * kWarpgroup;
  // The ping-pong order barrier: see kernel_forward.cuh.
  __device__ __forceinline__ void order_barrier_wait() {
    named_barrier_sync(ForwardNamedBarriers::kOrder + consumer_, kOrderThreads);
  }
  __device__ __forceinline__ void order_barrier_arrive() {
    named_barrier_arrive(ForwardNamedBarriers::kOrder + next_consumer_, kOrderThreads);
  }

  // s = q k^T of the next stage of K.
  __device__ __forceinline__ void start_scores(const State& k_state, float (&s)[kBlockN / 2]) {
    smem_.k_pipeline.consumer_wait(k_state);
    const uint64_t k_operand = k_major_descriptor(smem_address(smem_.k[k_state.stage]));
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int within = step % 4 * kKMajorStepBytes;
      wgmma<T, Major::kK, Major::kK>(
          s, q_operand_ + ((step / 4 * 64 * kSwizzleRowBytes + within) >> 4),
          k_operand + ((step / 4 * kColumnBlockBytes + within) >> 4), step > 0);
    }
    warpgroup_commit_batch();
  }
  // o += p v of the next stage of V.
  __device__ __forceinline__ void start_output(const State& v_state,
                                               const uint32_t (&p)[kBlockN / 4],
                                               float (&o)[kValueDim / 2]) {
    smem_.v_pipeline.consumer_wait(v_state);
    const uint64_t v_operand =
        mn_major_descriptor(smem_address(smem_.v[v_state.stage]), kColumnBlockBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      wgmma<T, Major::kMN>(o, p + 4 * step, v_operand + (step * kMnMajorStepBytes >> 4));
    }
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void release_q() {
    if constexpr (!Traits::kOutputInQ) {  // else the epilogue releases it
      smem_.q_pipeline.empty[0].arrive();
    }
  }
  __device__ __forceinline__ void release_k(State& k_state) {
    smem_.k_pipeline.consumer_release(k_state.stage);
    k_state.advance();
  }
  __device__ __forceinline__ void release_v(State& v_state) {
    smem_.v_pipeline.consumer_release(v_state.stage);
    v_state.advance();
  }

  // A key tile that only other consumers' queries see.
  __device__ __forceinline__ void skip_key_tile(State& k_state, State& v_state,
                                                bool passes_order_barrier) {
    smem_.k_pipeline.consumer_wait(k_state);
    release_k(k_state);
    smem_.v_pipeline.consumer_wait(v_state);
    release_v(v_state);
    if (!passes_order_barrier) return;
    order_barrier_wait();
    order_barrier_arrive();
  }

  Smem& smem_;
  const ForwardParams& params_;
  const int consumer_, next_consumer_;
  const float scale_log2_;
  const uint64_t q_operand_;
};

}  // namespace jaxllm::hopper
