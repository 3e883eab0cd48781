// The scorers and the byte layout of a page summary, the one place that knows it.
//
// Every scorer here is linear in a feature of the query: score = sum_v dot(feature_v(q), vector_v),
// so a page needs only its vectors, and the mean over a query group is one dot product with the mean
// feature. int8 summaries hold a 16-byte header with one fp32 scale per vector, then the codes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/element_type.h"

namespace tinyserve::core {

enum class PageStatistic : int32_t { kMax, kMin, kMean, kStd };
enum class QueryFeature : int32_t { kPositivePart, kNegativePart, kIdentity, kAbsolute };
enum class GroupReduction : int32_t { kMean, kMax };

inline constexpr int kMaxSummaryVectors = 3;
inline constexpr int64_t kSummaryHeaderBytes = 16;
inline constexpr int64_t kSummaryAlignment = 16;

struct SummaryVector {
  PageStatistic statistic;
  QueryFeature feature;
  float weight;
};

struct Scorer {
  std::string_view name;
  int num_vectors;
  SummaryVector vectors[kMaxSummaryVectors];
  bool quantised;  // int8 codes behind a header; otherwise elements of `full_type`
  ElementType full_type;

  constexpr int64_t code_bytes() const { return quantised ? 1 : element_size(full_type); }
  constexpr int64_t summary_bytes(int64_t head_dim, [[maybe_unused]] int64_t page_size) const {
    const int64_t bytes = (quantised ? kSummaryHeaderBytes : 0) + num_vectors * head_dim * code_bytes();
    return (bytes + kSummaryAlignment - 1) / kSummaryAlignment * kSummaryAlignment;
  }
};

inline constexpr SummaryVector kBoxMax{PageStatistic::kMax, QueryFeature::kPositivePart, 1.0F};
inline constexpr SummaryVector kBoxMin{PageStatistic::kMin, QueryFeature::kNegativePart, 1.0F};

inline constexpr Scorer kScorers[] = {
    {"bounds", 2, {kBoxMax, kBoxMin, {}}, true, {}},
    {"bounds_full_fp32", 2, {kBoxMax, kBoxMin, {}}, false, ElementType::kFloat32},
    {"bounds_full_fp16", 2, {kBoxMax, kBoxMin, {}}, false, ElementType::kFloat16},
    {"bounds_full_bf16", 2, {kBoxMax, kBoxMin, {}}, false, ElementType::kBFloat16},
    {"mean", 1, {{PageStatistic::kMean, QueryFeature::kIdentity, 1.0F}, {}, {}}, true, {}},
    {"mean_std",
     2,
     {{PageStatistic::kMean, QueryFeature::kIdentity, 1.0F},
      {PageStatistic::kStd, QueryFeature::kAbsolute, 1.0F},
      {}},
     true,
     {}},
    {"bounds_mean",
     3,
     {{PageStatistic::kMax, QueryFeature::kPositivePart, 0.7F},
      {PageStatistic::kMin, QueryFeature::kNegativePart, 0.7F},
      {PageStatistic::kMean, QueryFeature::kIdentity, 0.3F}},
     true,
     {}},
};

constexpr const Scorer* find_scorer(std::string_view name) {
  for (const Scorer& scorer : kScorers) {
    if (scorer.name == name) return &scorer;
  }
  return nullptr;
}

constexpr std::optional<GroupReduction> find_group_reduction(std::string_view name) {
  if (name == "mean") return GroupReduction::kMean;
  if (name == "max") return GroupReduction::kMax;
  return std::nullopt;
}

}  // namespace tinyserve::core
