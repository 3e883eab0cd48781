// How decode attention multiplies: pages widened to fp32, int8 pages in integers, bf16 pages by bf16 queries
// where the CPU has instructions for that. attend_pages.cpp takes one of these ways for a whole call.
#pragma once

#include <type_traits>

#include "core/limits.h"
#include "core/params.h"
#include "cpu/bf16_page.h"
#include "cpu/int8_page.h"
#include "cpu/page_block.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Every way offers, for kHeads query heads of a kv head and a chunk of pages:
//   Element       of the pages
//   load_queries  from query head `head` of a row on
//   logits        to[g * stride + t] of every slot of a page, whether the row sees it or not
//   take_weights  turns logits [kHeads, stride] into weights, exp(logit - largest) as this way rounds them;
//                 gives each head's largest logit and the sum of its exact weights
//   add_values    acc[g] += sum over the slots [first_slot, end_slot) of a page of weight * v, the page's
//                 weights from `first_weight` on; whatever other slots hold
//   finish        puts one head's acc in the order of the channels
// `acc` is [kHeads, head_dim]. A way is the same for all rows of a batch and looks at nothing but its row.

template <int kHeads, typename T>
inline void page_logits_token_major(const float* q, const T* keys, int64_t token_stride, int64_t page_size,
                                    int64_t head_dim, float* logits, int64_t stride) {
  for (int64_t t = 0; t < page_size; ++t) {
    F32x8 sum[kHeads];
    for (int g = 0; g < kHeads; ++g) sum[g] = splat(0.0F);
    const T* token = keys + t * token_stride;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const F32x8 k = load(token + d);
      for (int g = 0; g < kHeads; ++g) sum[g] += load(q + g * head_dim + d) * k;
    }
    for (int g = 0; g < kHeads; ++g) logits[g * stride + t] = horizontal_sum(sum[g]);
  }
}

template <int kHeads, typename T>
inline void page_logits(const float* q, const core::PagePoolView& pool, const T* keys, Ahead<T> next,
                        int64_t page_size, int64_t head_dim, float* logits, int64_t stride) {
  if (pool.channel_major()) {
    channel_major_logits<kHeads>(q, keys, next, pool.channel_stride, page_size, head_dim, logits, stride);
  } else {
    page_logits_token_major<kHeads>(q, keys, pool.token_stride, page_size, head_dim, logits, stride);
  }
}

// Pages widened to fp32.
template <typename T>
struct FloatProducts {
  using Element = T;

  alignas(64) float q[kHeadBlock * core::kMaxHeadDim];
  const float* weights;

  template <int kHeads>
  void load_queries(const core::AttendPagesParams& params, int64_t row, int64_t head) {
    for (int g = 0; g < kHeads; ++g) {
      load_query(params.q, row, head + g, params.head_dim, params.sm_scale, q + g * params.head_dim);
    }
  }

  template <int kHeads>
  void logits(const core::AttendPagesParams& params, Block<T> keys, Next<T> next, float* to,
              int64_t stride) const {
    page_logits<kHeads>(q, params.k_pages, keys.data, next.data(), params.page_size, params.head_dim, to,
                        stride);
  }

  template <int kHeads>
  void take_weights(float* logits, int64_t stride, float* maxima, float* sums) {
    for (int g = 0; g < kHeads; ++g) {
      maxima[g] = maximum(logits + g * stride, stride);
      sums[g] = softmax_numerators(logits + g * stride, stride, maxima[g]);
    }
    weights = logits;
  }

  template <int kHeads>
  void add_values(const core::AttendPagesParams& params, Block<T> values, Next<T> next, int64_t first_weight,
                  int64_t stride, int64_t first_slot, int64_t end_slot, float* acc) const {
    accumulate_values<kHeads>(weights + first_weight, stride, values.data, next.data(),
                              params.v_pages.token_stride, first_slot, end_slot, params.head_dim, acc);
  }

  void finish(int, float* acc, int64_t head_dim) const { restore_channels<T>(acc, head_dim); }
};

// int8 pages in integers, by queries and weights rounded to 16 bits (int8_page.h).
struct Int8Products : FloatProducts<int8_t> {
  QueryCodes codes;

  template <int kHeads>
  void load_queries(const core::AttendPagesParams& params, int64_t row, int64_t head) {
    FloatProducts::load_queries<kHeads>(params, row, head);
    codes.template round<kHeads>(q, params.head_dim);
  }

  template <int kHeads>
  void logits(const core::AttendPagesParams& params, Block<int8_t> keys, Next<int8_t> next, float* to,
              int64_t stride) const {
    prefetch(next.scales());
    int8_logits<kHeads>(codes, params.k_pages, keys.data, keys.scales, next.data(), params.page_size,
                        params.head_dim, to, stride);
  }

  template <int kHeads>
  void add_values(const core::AttendPagesParams& params, Block<int8_t> values, Next<int8_t> next,
                  int64_t first_weight, int64_t stride, int64_t first_slot, int64_t end_slot,
                  float* acc) const {
    prefetch(next.scales());
    accumulate_int8_values<kHeads>(weights + first_weight, stride, values.data, next.data(),
                                   params.v_pages.token_stride, values.scales, first_slot, end_slot,
                                   params.page_size, params.head_dim, acc);
  }

  void finish(int, float* acc, int64_t head_dim) const { restore_int8_channels(acc, head_dim); }
};

// Calls f with a null pointer of the way to multiply.
template <typename F>
inline void dispatch_products(const core::AttendPagesParams& params, const F& f) {
#if defined(__AVX512BF16__)
  if (params.k_pages.type == core::ElementType::kBFloat16 && params.q.type == core::ElementType::kBFloat16) {
    return f(static_cast<BFloat16Products*>(nullptr));
  }
#endif
  if (params.k_pages.type == core::ElementType::kInt8) return f(static_cast<Int8Products*>(nullptr));
  dispatch_element(params.k_pages.type, [&](auto* tag) {
    f(static_cast<FloatProducts<std::remove_pointer_t<decltype(tag)>>*>(nullptr));
  });
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
