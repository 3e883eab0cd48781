// Joins the scores of a group's query heads to one per page in the log domain, for GroupReduction::kSoftmax:
// log sum_g exp(score_gj - lse_g), lse_g the log-sum-exp of head g's scores over all pages of the row that
// have a summary. With log-sum-exp scores this is the logarithm of the share of attention that page j would
// get, added over the heads, were those all the pages. The other reductions are done by score_pages.
//
// One work item walks a row's pages in order, whole vectors from the first page on, so the result does not
// depend on threads, chunks or the batch. head_scores is working memory: it is overwritten.

#include "cpu/kernels.h"
#include "cpu/log_exp.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr float kInfinity = __builtin_inff();

// Eight scores from i on; -inf behind the last of n.
inline F32x8 load_scores(const float* scores, int64_t i, int64_t n) {
  if (i + kLanes <= n) return load(scores + i);
  F32x8 x = splat(-kInfinity);
  for (int64_t lane = 0; i + lane < n; ++lane) x[lane] = scores[i + lane];
  return x;
}

// NaN loses.
inline F32x8 maximum(F32x8 a, F32x8 b) { return b > a ? b : a; }

// Log-sum-exp of n scores; NaN scores are left out, +inf gives +inf.
float log_sum_exp_of_numbers(const float* scores, int64_t n) {
  F32x8 lanes = splat(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes) lanes = maximum(lanes, load_scores(scores, i, n));
  const float max = horizontal_maximum(lanes);
  if (max == -kInfinity || max == kInfinity) return max;
  F32x8 sum = splat(0.0F);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x8 x = load_scores(scores, i, n) - splat(max);
    sum += select(x == x, exp2_nonpositive(splat(kLog2OfE) * x), splat(0.0F));
  }
  return max + log_positive(splat(horizontal_sum(sum)))[0];
}

// A head's scores less its lse. A page at +inf has all of the head's share; a head that gives every page -inf
// (lse -inf) has none to give.
inline F32x8 log_share(F32x8 score, float lse) {
  const I32x8 all = score == splat(kInfinity);
  const I32x8 none = score == splat(-kInfinity);
  return select(all, splat(0.0F), select(none, splat(-kInfinity), score - splat(lse)));
}

inline void store_scores(F32x8 x, float* scores, int64_t i, int64_t n) {
  if (i + kLanes <= n) {
    store(scores + i, x);
  } else {
    for (int64_t lane = 0; i + lane < n; ++lane) scores[i + lane] = x[lane];
  }
}

// Log-sum-exp of the shares of pages i to i + 7 over the heads, whose rows lie `stride` apart.
inline F32x8 join_shares(const float* shares, int64_t stride, int64_t num_heads, int64_t i, int64_t n) {
  F32x8 max = splat(-kInfinity);
  for (int64_t g = 0; g < num_heads; ++g) max = maximum(max, load_scores(shares + g * stride, i, n));
  const I32x8 nothing = max == splat(-kInfinity);
  const F32x8 shift = select(nothing, splat(0.0F), max);
  F32x8 sum = splat(0.0F);
  for (int64_t g = 0; g < num_heads; ++g) {
    sum += exp2_nonpositive(splat(kLog2OfE) * (load_scores(shares + g * stride, i, n) - shift));
  }
  return select(nothing & (sum == sum), splat(-kInfinity), shift + log_positive(sum));
}

}  // namespace

void join_scores(const core::ScorePagesParams& params, int64_t begin, int64_t end) {
  if (params.group_reduction != core::GroupReduction::kSoftmax) return;
  for (int64_t row_head = begin; row_head < end; ++row_head) {
    const core::Row& row = params.rows[row_head / params.num_kv_heads];
    const int64_t first_page = row.first_page(params.page_size);
    const int64_t num_pages = row.num_tokens / params.page_size - first_page;
    float* shares = params.head_scores + row_head * params.group_size * params.row_stride + first_page;
    float* page_scores = params.page_scores + row_head * params.row_stride + first_page;
    for (int64_t g = 0; g < params.group_size; ++g) {
      float* scores = shares + g * params.row_stride;  // become shares in place
      const float lse = log_sum_exp_of_numbers(scores, num_pages);
      for (int64_t i = 0; i < num_pages; i += kLanes) {
        store_scores(log_share(load_scores(scores, i, num_pages), lse), scores, i, num_pages);
      }
    }
    for (int64_t i = 0; i < num_pages; i += kLanes) {
      store_scores(join_shares(shares, params.row_stride, params.group_size, i, num_pages), page_scores, i,
                   num_pages);
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
