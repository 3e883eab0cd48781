// Exact top-K pages per row and kv head in linear time. Scores of one row lie close together, so equal steps
// between the lowest and the highest spread them over many bins: a histogram finds the bin of the K-th best,
// and a radix select over order-preserving 32-bit keys (11 + 11 + 10 bits) ranks the few in that bin, or all
// of them where the steps do not help (infinities, NaN, one far outlier). One ascending pass then emits
// forced pages, better pages, and the lowest-numbered of those that tie with the K-th.

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

float score_of(uint32_t key) {
  if (key == 0) return __builtin_nanf("");
  return bits_to_float((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}

constexpr int64_t kNumBins = 1024;
constexpr int64_t kMaxRanked = 1024;  // scores of the K-th best's bin

// The K-th best score, and how many pages with exactly this score are within the best K.
struct Threshold {
  float score;
  int64_t num_ties;
};

// The k-th best (k >= 1) of n scores.
Threshold radix_threshold(const float* scores, int64_t n, int64_t k) {
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
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = order_key(scores[i]);
      if ((key & prefix_mask) == prefix) ++histogram[(key >> digit.shift) & digit.mask];
    }
    uint32_t bin = digit.mask;
    while (histogram[bin] < k) k -= histogram[bin--];
    prefix |= bin << digit.shift;
    prefix_mask |= digit.mask << digit.shift;
  }
  return {score_of(prefix), k};
}

// Equal steps from the lowest to the highest of n scores. Rounding keeps the order: a better score never
// falls into a lower bin.
struct Bins {
  float lowest;
  float per_step;
  bool useful;

  I32x8 of(F32x8 scores) const {
    return __builtin_convertvector((scores - splat(lowest)) * splat(per_step), I32x8);
  }
  int32_t of(float score) const { return static_cast<int32_t>((score - lowest) * per_step); }
};

Bins find_bins(const float* scores, int64_t n) {
  F32x8 low = splat(scores[0]);
  F32x8 high = low;
  F32x8 zero = splat(0.0F);  // becomes NaN with the first score that is not finite
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32x8 x = load(scores + i);
    low = x < low ? x : low;
    high = x > high ? x : high;
    zero += x - x;
  }
  float lowest = low[0];
  float highest = high[0];
  float all_zero = horizontal_sum(zero);
  for (int lane = 1; lane < kLanes; ++lane) {
    if (low[lane] < lowest) lowest = low[lane];
    if (high[lane] > highest) highest = high[lane];
  }
  for (; i < n; ++i) {
    if (scores[i] < lowest) lowest = scores[i];
    if (scores[i] > highest) highest = scores[i];
    all_zero += scores[i] - scores[i];
  }
  const float per_step = static_cast<float>(kNumBins - 1) / (highest - lowest);
  const bool useful = all_zero == 0.0F && per_step > 0.0F && per_step < __builtin_inff();
  return {lowest, per_step, useful};
}

// Calls f(i) for every lane of the mask.
template <typename F>
void for_each_lane(uint32_t mask, const F& f) {
  for (; mask != 0; mask &= mask - 1) f(__builtin_ctz(mask));
}

// The k-th best (1 <= k <= n) of n scores.
Threshold find_threshold(const float* scores, int64_t n, int64_t k) {
  const Bins bins = find_bins(scores, n);
  if (!bins.useful) return radix_threshold(scores, n, k);
  int32_t histogram[kNumBins] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const I32x8 bin = bins.of(load(scores + i));
    for (int lane = 0; lane < kLanes; ++lane) ++histogram[bin[lane]];
  }
  for (; i < n; ++i) ++histogram[bins.of(scores[i])];
  int32_t bin = kNumBins - 1;
  int64_t rank = k;
  while (histogram[bin] < rank) rank -= histogram[bin--];
  if (histogram[bin] > kMaxRanked) return radix_threshold(scores, n, k);

  float ranked[kMaxRanked];
  int64_t num_ranked = 0;
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const F32x8 x = load(scores + i);
    for_each_lane(lane_mask(bins.of(x) == bin), [&](int lane) { ranked[num_ranked++] = x[lane]; });
  }
  for (; i < n; ++i) {
    if (bins.of(scores[i]) == bin) ranked[num_ranked++] = scores[i];
  }
  return radix_threshold(ranked, num_ranked, rank);
}

// Appends the pages of the best `k` of scores [begin, end) to `selected`, ascending; returns how many.
int64_t select_best(const float* scores, int64_t begin, int64_t end, int64_t k, int32_t* selected) {
  Threshold threshold = find_threshold(scores + begin, end - begin, k);
  const bool nan = threshold.score != threshold.score;  // every number is better
  int64_t count = 0;
  int64_t page = begin;
  for (; page + kLanes <= end; page += kLanes) {
    const F32x8 x = load(scores + page);
    const I32x8 ties = nan ? x != x : x == splat(threshold.score);
    const I32x8 wanted = ties | (nan ? x == x : x > splat(threshold.score));
    const uint32_t tie_mask = lane_mask(ties);
    for_each_lane(lane_mask(wanted), [&](int lane) {
      if ((tie_mask >> lane & 1U) != 0 && threshold.num_ties-- <= 0) return;
      selected[count++] = static_cast<int32_t>(page + lane);
    });
  }
  for (; page < end; ++page) {
    const float x = scores[page];
    const bool tie = nan ? x != x : x == threshold.score;
    if (tie ? threshold.num_ties-- > 0 : (nan || x > threshold.score)) {
      selected[count++] = static_cast<int32_t>(page);
    }
  }
  return count;
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
      count += select_best(scores, sink_end, recent_begin, num_free, selected + count);
    }
    for (int64_t page = recent_begin; page < end_page; ++page) selected[count++] = static_cast<int32_t>(page);
    params.num_selected[item] = static_cast<int32_t>(count);
    for (; count < params.max_page_budget; ++count) selected[count] = -1;
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
