// Exact top-K pages per row and kv head in linear time: a radix select over order-preserving 32-bit
// keys (11 + 11 + 10 bits) finds the K-th best key, and one ascending pass emits forced pages, better
// pages, and the lowest-numbered of those that tie with the K-th.

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Greater key = better score; NaN is 0, below -inf; -0.0 equals 0.0.
uint32_t order_key(float score) {
  if (score != score) return 0;
  const uint32_t bits = float_to_bits(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

struct Threshold {
  uint32_t key;      // the K-th best key
  int64_t num_ties;  // how many pages with exactly this key are within the best K
};

// The k-th best key (k >= 1) of candidates [begin, end).
Threshold find_threshold(const float* scores, int64_t begin, int64_t end, int64_t k) {
  struct Digit {
    int shift;
    uint32_t mask;
  };
  constexpr Digit kDigits[] = {{21, 0x7ffU}, {10, 0x7ffU}, {0, 0x3ffU}};
  int32_t histogram[2048];
  uint32_t prefix = 0;
  uint32_t prefix_mask = 0;
  for (const Digit& digit : kDigits) {
    __builtin_memset(histogram, 0, sizeof(histogram));
    for (int64_t page = begin; page < end; ++page) {
      const uint32_t key = order_key(scores[page]);
      if ((key & prefix_mask) == prefix) ++histogram[(key >> digit.shift) & digit.mask];
    }
    uint32_t bin = digit.mask;
    while (histogram[bin] < k) k -= histogram[bin--];
    prefix |= bin << digit.shift;
    prefix_mask |= digit.mask << digit.shift;
  }
  return {prefix, k};
}

}  // namespace

void select_pages(const core::SelectPagesParams& params, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const core::Row& row = params.rows[item / params.num_kv_heads];
    const float* scores = params.page_scores + item * params.row_stride;
    int32_t* selected = params.selected_pages + item * params.max_page_budget;

    const int64_t first_page = row.first_page(params.page_size);
    const int64_t end_page = row.end_page(params.page_size);
    const int64_t num_visible = end_page - first_page;
    int64_t budget = params.page_budget[row.sequence];
    if (budget > num_visible) budget = num_visible;

    // [first_page, sink_end) and [recent_begin, end_page) are forced, the rest are candidates.
    int64_t sink_end = params.num_sink_pages > first_page ? params.num_sink_pages : first_page;
    int64_t recent_begin = end_page - params.num_recent_pages;
    if (recent_begin < first_page) recent_begin = first_page;
    if (sink_end > recent_begin) sink_end = recent_begin;
    const int64_t num_free = budget - (sink_end - first_page) - (end_page - recent_begin);

    int64_t count = 0;
    for (int64_t page = first_page; page < sink_end; ++page) selected[count++] = static_cast<int32_t>(page);
    if (num_free >= recent_begin - sink_end) {
      for (int64_t page = sink_end; page < recent_begin; ++page)
        selected[count++] = static_cast<int32_t>(page);
    } else if (num_free > 0) {
      Threshold threshold = find_threshold(scores, sink_end, recent_begin, num_free);
      for (int64_t page = sink_end; page < recent_begin; ++page) {
        const uint32_t key = order_key(scores[page]);
        if (key > threshold.key || (key == threshold.key && threshold.num_ties-- > 0)) {
          selected[count++] = static_cast<int32_t>(page);
        }
      }
    }
    for (int64_t page = recent_begin; page < end_page; ++page) selected[count++] = static_cast<int32_t>(page);
    params.num_selected[item] = static_cast<int32_t>(count);
    for (; count < params.max_page_budget; ++count) selected[count] = -1;
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
