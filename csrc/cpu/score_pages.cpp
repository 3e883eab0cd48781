// Page scores from a query and the page summaries: one dot product per page with the query's features.

#include <type_traits>

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

inline constexpr int64_t kMaxFeatures = core::kMaxSummaryVectors * core::kMaxHeadDim;

inline F32x8 query_feature(F32x8 q, core::QueryFeature feature) {
  const F32x8 zero = splat(0.0F);
  switch (feature) {
    case core::QueryFeature::kPositivePart:
      return select(q < zero, zero, q);  // NaN stays NaN
    case core::QueryFeature::kNegativePart:
      return select(q > zero, zero, q);
    case core::QueryFeature::kAbsolute:
      return select(q < zero, -q, q);
    case core::QueryFeature::kIdentity:
      break;
  }
  return q;
}

// features[v * head_dim + d] += weight * feature_v(q[d])
void add_features(const float* q, int64_t head_dim, const core::Scorer& scorer, float scale,
                  float* features) {
  for (int v = 0; v < scorer.num_vectors; ++v) {
    const F32x8 weight = splat(scorer.vectors[v].weight * scale);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      float* feature = features + v * head_dim + d;
      store(feature, load(feature) + weight * query_feature(load(q + d), scorer.vectors[v].feature));
    }
  }
}

template <typename Code>
float dot_vectors(const uint8_t* summary, const core::Scorer& scorer, const float* features,
                  int64_t head_dim) {
  const auto* codes =
      reinterpret_cast<const Code*>(summary + (scorer.quantised ? core::kSummaryHeaderBytes : 0));
  F32x8 total = splat(0.0F);
  for (int v = 0; v < scorer.num_vectors; ++v) {
    F32x8 even = splat(0.0F);
    F32x8 odd = splat(0.0F);
    int64_t d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      even += load(features + d) * load(codes + d);
      odd += load(features + d + kLanes) * load(codes + d + kLanes);
    }
    if (d < head_dim) even += load(features + d) * load(codes + d);
    float scale = 1.0F;
    if (scorer.quantised) __builtin_memcpy(&scale, summary + 4 * v, 4);
    total += splat(scale) * (even + odd);
    codes += head_dim;
    features += head_dim;
  }
  return horizontal_sum(total);
}

float dot_summary(const uint8_t* summary, const core::Scorer& scorer, const float* features,
                  int64_t head_dim) {
  if (scorer.quantised) return dot_vectors<int8_t>(summary, scorer, features, head_dim);
  float dot = 0.0F;
  dispatch_element(scorer.full_type, [&](auto* tag) {
    dot = dot_vectors<std::remove_pointer_t<decltype(tag)>>(summary, scorer, features, head_dim);
  });
  return dot;
}

}  // namespace

void score_pages(const core::ScorePagesParams& params, int64_t begin, int64_t end) {
  const core::Scorer& scorer = *params.scorer;
  const bool group_max = params.group_reduction == core::GroupReduction::kMax;
  const int64_t num_features = group_max ? params.group_size : 1;
  const int64_t feature_size = scorer.num_vectors * params.head_dim;
  float q[core::kMaxHeadDim];
  float features[kMaxFeatures];
  int64_t features_of = -1;  // row * num_kv_heads + head whose features are held (group mean only)

  for (int64_t item = begin; item < end; ++item) {
    const int64_t chunk = item % params.max_chunks;
    const int64_t row_head = item / params.max_chunks;
    const int64_t head = row_head % params.num_kv_heads;
    const core::Row& row = params.rows[row_head / params.num_kv_heads];
    const int64_t first_page = row.first_page(params.page_size) + chunk * core::kScoreChunkPages;
    int64_t end_page = first_page + core::kScoreChunkPages;
    if (end_page > row.end_page(params.page_size)) end_page = row.end_page(params.page_size);
    if (first_page >= end_page) continue;

    const int64_t query = (row_head / params.num_kv_heads) * params.q.token_stride;
    float* scores = params.page_scores + row_head * params.row_stride;
    // A page not full of visible tokens has no summary yet; it is the last one and always attended.
    const int64_t sealed_end = row.num_tokens / params.page_size;
    const float infinity = __builtin_inff();

    for (int64_t f = 0; f < num_features; ++f) {
      if (group_max || features_of != row_head) {
        __builtin_memset(features, 0, static_cast<size_t>(feature_size) * sizeof(float));
        const int64_t first = group_max ? f : 0;
        const int64_t last = group_max ? f + 1 : params.group_size;
        const float scale = params.sm_scale / (group_max ? 1.0F : static_cast<float>(params.group_size));
        for (int64_t g = first; g < last; ++g) {
          load_row(params.q.data, params.q.type,
                   query + (head * params.group_size + g) * params.q.head_stride, params.head_dim, q);
          add_features(q, params.head_dim, scorer, scale, features);
        }
        features_of = row_head;
      }
      for (int64_t page = first_page; page < end_page; ++page) {
        if (page >= sealed_end) {
          scores[page] = infinity;
          continue;
        }
        const float score = dot_summary(params.page_summary.row(row.page_table[page], head), scorer, features,
                                        params.head_dim);
        // NaN wins over every number, so that it stays visible and the selection ranks the page last.
        if (f == 0 || score > scores[page] || score != score) scores[page] = score;
      }
    }
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
