// Scores of the scorers that are linear in a feature of the query: one dot product per summary vector, each
// vector read once for all heads of a block.
#pragma once

#include <type_traits>

#include "core/limits.h"
#include "core/params.h"
#include "cpu/lanes_of_heads.h"
#include "cpu/simd.h"
#include "cpu/summary_rows.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// [kMaxSummaryVectors, kScoreHeads, head_dim]
inline constexpr int64_t kMaxFeatures = core::kMaxSummaryVectors * kScoreHeads * core::kMaxHeadDim;

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

// features[v][h][d] += scale * weight_v * feature_v(q[d]), h one of num_heads.
inline void add_features(const float* q, int64_t head_dim, const core::Scorer& scorer, float scale, int64_t h,
                         int64_t num_heads, float* features) {
  for (int v = 0; v < scorer.num_vectors; ++v) {
    const F32x8 weight = splat(scorer.vectors[v].weight * scale);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      float* feature = features + (v * num_heads + h) * head_dim + d;
      store(feature, load(feature) + weight * query_feature(load(q + d), scorer.vectors[v].feature));
    }
  }
}

// features: [num_vectors, kHeads, head_dim]; lane h of the result is head h's score.
template <int kHeads, typename Code>
inline F32x4 dot_vectors(const uint8_t* summary, const core::Scorer& scorer, const float* features,
                         int64_t head_dim) {
  const auto* codes = reinterpret_cast<const Code*>(summary + scorer.header_bytes());
  F32x8 total[kHeads];
  for (int h = 0; h < kHeads; ++h) total[h] = splat(0.0F);
  for (int v = 0; v < scorer.num_vectors; ++v) {
    F32x16 sum[kHeads];
    for (int h = 0; h < kHeads; ++h) sum[h] = splat16(0.0F);
    int64_t d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      const F32x16 x = load16_in_order(codes + d);
      for (int h = 0; h < kHeads; ++h) sum[h] += load16(features + h * head_dim + d) * x;
    }
    F32x8 half[kHeads];
    for (int h = 0; h < kHeads; ++h) half[h] = low_half(sum[h]) + high_half(sum[h]);
    if (d < head_dim) {
      const F32x8 last = load(codes + d);
      for (int h = 0; h < kHeads; ++h) half[h] += load(features + h * head_dim + d) * last;
    }
    // Unscaled codes first: a scale near the largest float times a code may overflow.
    float scale = 1.0F;
    if constexpr (std::is_same_v<Code, int8_t>) __builtin_memcpy(&scale, summary + 4 * v, 4);
    for (int h = 0; h < kHeads; ++h) total[h] += splat(scale) * half[h];
    codes += head_dim;
    features += kHeads * head_dim;
  }
  return sum_heads<kHeads>(total);
}

// scores: [num_pages, kScoreHeads]
template <int kHeads>
inline void score_vectors(const SummaryBlock& block, const core::Scorer& scorer, const float* features,
                          int64_t head_dim, float* scores) {
  const auto score = [&](auto* tag) {
    using Code = std::remove_pointer_t<decltype(tag)>;
    block.for_each([&](const uint8_t* summary, int64_t i) {
      store4(scores + i * kScoreHeads, dot_vectors<kHeads, Code>(summary, scorer, features, head_dim));
    });
  };
  if (scorer.encoding == core::SummaryEncoding::kInt8) {
    score(static_cast<int8_t*>(nullptr));
  } else {
    dispatch_element(scorer.full_type, score);
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
