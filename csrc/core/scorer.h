// The scorers and the byte layout of a page summary, the one place that knows it.
//
// Most scorers are linear in a feature of the query: score = sum_v dot(feature_v(q), vector_v), so a page
// needs only its vectors, and the mean over a query group is one dot product with the mean feature. int8
// summaries hold a 16-byte header with one fp32 scale per vector, then the codes.
//
// A low-rank summary holds the mean key and a sketch of the centred keys, from which the logit of every token
// follows: key_t ~ mean_scale * mean + sum over ranks of scale * coefficient[t] * basis.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/element_type.h"

namespace tinyserve::core {

enum class PageStatistic : int32_t { kMax, kMin, kMean, kStd };
enum class QueryFeature : int32_t { kPositivePart, kNegativePart, kIdentity, kAbsolute };
enum class SummaryEncoding : int32_t { kInt8, kFull, kLowRank };
enum class TokenReduction : int32_t { kLogSumExp, kMax };  // of a page's logits to its score
enum class GroupReduction : int32_t { kMean, kMax, kSoftmax };

inline constexpr int kMaxSummaryVectors = 3;
inline constexpr int kMaxRank = 8;
inline constexpr int64_t kSummaryHeaderBytes = 16;
inline constexpr int64_t kSummaryAlignment = 16;

// int4 codes come in blocks of 16 in 8 bytes: byte j holds code j in its low half and code j + 8 in its high
// half, each as code + 8. Codes lie in [-7, 7]; those that fill the last block up are 0.
inline constexpr int64_t kInt4Block = 16;
inline constexpr int64_t kInt4BlockBytes = 8;

constexpr int64_t int4_bytes(int64_t num_codes) {
  return (num_codes + kInt4Block - 1) / kInt4Block * kInt4BlockBytes;
}

struct SummaryVector {
  PageStatistic statistic;
  QueryFeature feature;
  float weight;
};

// Where the parts of a low-rank summary begin. The mean's int8 codes [head_dim] come first.
struct LowRankLayout {
  int64_t basis;              // int4 [rank][basis_bytes]
  int64_t basis_bytes;        // head_dim codes of one rank
  int64_t coefficients;       // int4 [rank][coefficient_bytes]
  int64_t coefficient_bytes;  // page_size codes of one rank
  int64_t scales;             // bf16 [1 + rank], not aligned: the mean's, then one per rank
  int64_t end;
};

struct Scorer {
  std::string_view name;
  SummaryEncoding encoding;
  int num_vectors;  // 0 in a low-rank summary
  SummaryVector vectors[kMaxSummaryVectors];
  ElementType full_type;           // of kFull
  int rank;                        // of kLowRank: at most page_size - 1
  TokenReduction token_reduction;  // of kLowRank

  // Whether the score is linear in a feature of the query.
  constexpr bool linear() const { return encoding != SummaryEncoding::kLowRank; }

  // Of one code of a linear scorer's vectors.
  constexpr int64_t code_bytes() const {
    return encoding == SummaryEncoding::kFull ? element_size(full_type) : 1;
  }
  constexpr int64_t header_bytes() const {
    return encoding == SummaryEncoding::kInt8 ? kSummaryHeaderBytes : 0;
  }
  constexpr LowRankLayout low_rank_layout(int64_t head_dim, int64_t page_size) const {
    LowRankLayout layout{.basis = head_dim,
                         .basis_bytes = int4_bytes(head_dim),
                         .coefficients = 0,
                         .coefficient_bytes = int4_bytes(page_size),
                         .scales = 0,
                         .end = 0};
    layout.coefficients = layout.basis + rank * layout.basis_bytes;
    layout.scales = layout.coefficients + rank * layout.coefficient_bytes;
    layout.end = layout.scales + (1 + rank) * static_cast<int64_t>(sizeof(BFloat16));
    return layout;
  }
  // Without the zeros that fill the row up.
  constexpr int64_t used_bytes(int64_t head_dim, int64_t page_size) const {
    return linear() ? header_bytes() + num_vectors * head_dim * code_bytes()
                    : low_rank_layout(head_dim, page_size).end;
  }
  constexpr int64_t summary_bytes(int64_t head_dim, int64_t page_size) const {
    return (used_bytes(head_dim, page_size) + kSummaryAlignment - 1) / kSummaryAlignment * kSummaryAlignment;
  }
};

inline constexpr SummaryVector kBoxMax{PageStatistic::kMax, QueryFeature::kPositivePart, 1.0F};
inline constexpr SummaryVector kBoxMin{PageStatistic::kMin, QueryFeature::kNegativePart, 1.0F};

constexpr Scorer int8_scorer(std::string_view name, int num_vectors, SummaryVector first,
                             SummaryVector second = {}, SummaryVector third = {}) {
  return {name, SummaryEncoding::kInt8, num_vectors, {first, second, third}, {}, 0, {}};
}
constexpr Scorer full_bounds_scorer(std::string_view name, ElementType type) {
  return {name, SummaryEncoding::kFull, 2, {kBoxMax, kBoxMin, {}}, type, 0, {}};
}
constexpr Scorer low_rank_scorer(std::string_view name, int rank, TokenReduction reduction) {
  return {name, SummaryEncoding::kLowRank, 0, {}, {}, rank, reduction};
}

inline constexpr Scorer kScorers[] = {
    int8_scorer("bounds", 2, kBoxMax, kBoxMin),
    full_bounds_scorer("bounds_full_fp32", ElementType::kFloat32),
    full_bounds_scorer("bounds_full_fp16", ElementType::kFloat16),
    full_bounds_scorer("bounds_full_bf16", ElementType::kBFloat16),
    int8_scorer("mean", 1, {PageStatistic::kMean, QueryFeature::kIdentity, 1.0F}),
    int8_scorer("mean_std", 2, {PageStatistic::kMean, QueryFeature::kIdentity, 1.0F},
                {PageStatistic::kStd, QueryFeature::kAbsolute, 1.0F}),
    int8_scorer("bounds_mean", 3, {PageStatistic::kMax, QueryFeature::kPositivePart, 0.7F},
                {PageStatistic::kMin, QueryFeature::kNegativePart, 0.7F},
                {PageStatistic::kMean, QueryFeature::kIdentity, 0.3F}),
    low_rank_scorer("low_rank_1", 1, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_2", 2, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_3", 3, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_4", 4, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_5", 5, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_6", 6, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_7", 7, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_8", 8, TokenReduction::kLogSumExp),
    low_rank_scorer("low_rank_max_1", 1, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_2", 2, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_3", 3, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_4", 4, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_5", 5, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_6", 6, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_7", 7, TokenReduction::kMax),
    low_rank_scorer("low_rank_max_8", 8, TokenReduction::kMax),
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
  if (name == "softmax") return GroupReduction::kSoftmax;
  return std::nullopt;
}

}  // namespace tinyserve::core
