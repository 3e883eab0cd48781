// The scorers' formula, applied in double precision to the numbers of the summaries, with what rounding may
// add: for the tests of score_pages on the CPU and in CUDA.
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/params.h"
#include "core/scorer.h"
#include "paged_problem.h"
#include "summaries.h"

namespace tinyserve::cpu::testing {

using core::GroupReduction;
using core::QueryFeature;
using core::Scorer;
using core::TokenReduction;

inline int64_t max_pages(const PagedProblem& problem) {
  int64_t most = 0;
  for (size_t s = 0; s < problem.sequences.size(); ++s) most = std::max(most, problem.num_pages_of(s));
  return most;
}

inline double feature(QueryFeature which, double q) {
  switch (which) {
    case QueryFeature::kPositivePart:
      return std::max(q, 0.0);
    case QueryFeature::kNegativePart:
      return std::min(q, 0.0);
    case QueryFeature::kAbsolute:
      return std::fabs(q);
    case QueryFeature::kIdentity:
      break;
  }
  return q;
}

inline bool exists(const Scorer& scorer, GroupReduction reduction) {
  return scorer.linear() || reduction != GroupReduction::kMean;
}

// A score and how far rounding may take a kernel's from it.
struct PageScore {
  double score = 0.0;
  double tolerance = 0.0;
};

inline double log_sum_exp(const std::vector<double>& x) {
  const double max = *std::ranges::max_element(x);
  double sum = 0.0;
  for (const double one : x) sum += std::exp(one - max);
  return max + std::log(sum);
}

inline PageScore linear_score(const Summaries& summaries, int64_t page_id, int64_t head,
                              const std::vector<double>& q, double sm_scale) {
  PageScore total;
  for (int v = 0; v < summaries.scorer->num_vectors; ++v) {
    for (int64_t d = 0; d < summaries.head_dim; ++d) {
      const double term = sm_scale * summaries.scorer->vectors[v].weight *
                          feature(summaries.scorer->vectors[v].feature, q[d]) *
                          summaries.number(page_id, head, v, d);
      total.score += term;
      total.tolerance += 3e-6 * std::fabs(term);
    }
  }
  return total;
}

// The kernel rounds queries to 16 bits, which costs up to half a step per channel.
inline PageScore low_rank_score(const Summaries& summaries, int64_t page_id, int64_t head,
                                const std::vector<double>& q, double sm_scale) {
  const Sketch sketch = read_sketch(summaries, page_id, head);
  double largest = 0.0;
  for (const double x : q) largest = std::max(largest, std::fabs(x));
  const auto dot = [&](const std::vector<double>& vector) {
    PageScore out;
    for (size_t d = 0; d < q.size(); ++d) {
      out.score += sm_scale * q[d] * vector[d];
      // Stored codes are 8 more, and the 8s come off again.
      out.tolerance += sm_scale * (0.51 / 32767.0 * largest * std::fabs(vector[d]) +
                                   1e-6 * std::fabs(q[d]) * (std::fabs(vector[d]) + 8.0));
    }
    return out;
  };
  PageScore page = dot(sketch.mean);
  std::vector<double> logits(static_cast<size_t>(summaries.page_size), page.score);
  for (size_t r = 0; r < sketch.basis.size(); ++r) {
    const PageScore along = dot(sketch.basis[r]);
    double widest = 0.0;
    for (size_t t = 0; t < logits.size(); ++t) {
      logits[t] += along.score * sketch.coefficients[r][t];
      widest = std::max(widest, std::fabs(sketch.coefficients[r][t]));
    }
    page.tolerance += 3.0 * widest * along.tolerance;
  }
  page.tolerance += 2e-6;
  page.score = summaries.scorer->token_reduction == TokenReduction::kMax ? *std::ranges::max_element(logits)
                                                                         : log_sum_exp(logits);
  return page;
}

// What the scores of a group's heads [group_size][num_pages] come to.
inline std::vector<PageScore> reduced(const std::vector<std::vector<PageScore>>& heads,
                                      GroupReduction reduction) {
  std::vector<PageScore> pages(heads[0].size());
  std::vector<double> lses;
  double widest = 0.0;
  for (const std::vector<PageScore>& head : heads) {
    std::vector<double> scores;
    for (const PageScore& page : head) {
      scores.push_back(page.score);
      widest = std::max(widest, page.tolerance + 1e-6 * std::fabs(page.score));
    }
    lses.push_back(log_sum_exp(scores));
  }
  for (size_t page = 0; page < pages.size(); ++page) {
    std::vector<double> shares;
    pages[page].score = reduction == GroupReduction::kMax ? -kInfinity : 0.0;
    for (size_t g = 0; g < heads.size(); ++g) {
      const PageScore& one = heads[g][page];
      pages[page].tolerance = std::max(pages[page].tolerance, one.tolerance);
      pages[page].score = reduction == GroupReduction::kMax
                              ? std::max(pages[page].score, one.score)
                              : pages[page].score + one.score / static_cast<double>(heads.size());
      shares.push_back(one.score - lses[g]);
    }
    if (reduction == GroupReduction::kSoftmax) {
      pages[page] = {.score = log_sum_exp(shares), .tolerance = 2.0 * widest + 2e-6};
    }
  }
  return pages;
}

inline void require_scores(const std::vector<float>& actual, const PagedProblem& problem,
                           const Summaries& summaries, GroupReduction reduction) {
  const Shape& shape = problem.shape;
  const int64_t width = max_pages(problem);
  const auto page_score = summaries.scorer->linear() ? linear_score : low_rank_score;
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    const auto [s, position] = problem.row_places[row];
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      std::vector<int64_t> sealed;
      std::vector<std::vector<PageScore>> heads(shape.group_size);
      const float* scores = actual.data() + (row * shape.num_kv_heads + head) * width;
      for (int64_t page = 0; page < width; ++page) {
        const int64_t last_token = std::min(position, (page + 1) * shape.page_size - 1);
        const bool visible = page * shape.page_size <= position && problem.sees(row, last_token);
        if (visible && (page + 1) * shape.page_size <= position + 1) {
          sealed.push_back(page);
          continue;
        }
        const double expected = visible ? kInfinity : -kInfinity;
        if (scores[page] != expected)
          FAIL("row " << row << ", page " << page << ": " << scores[page] << ", not " << expected);
      }
      if (sealed.empty()) continue;
      for (int64_t g = 0; g < shape.group_size; ++g) {
        const std::vector<double> q = problem.query(row, head * shape.group_size + g);
        for (const int64_t page : sealed) {
          heads[g].push_back(page_score(summaries, problem.page_tables[s][page], head, q, shape.sm_scale()));
        }
      }
      const std::vector<PageScore> expected = reduced(heads, reduction);
      for (size_t i = 0; i < sealed.size(); ++i) {
        const float got = scores[sealed[i]];
        if (!(std::fabs(got - expected[i].score) <= expected[i].tolerance)) {
          FAIL("row " << row << ", head " << head << ", page " << sealed[i] << ": " << got << ", not "
                      << expected[i].score << " within " << expected[i].tolerance);
        }
      }
    }
  }
}

inline constexpr GroupReduction kReductions[] = {GroupReduction::kMean, GroupReduction::kMax,
                                                 GroupReduction::kSoftmax};

}  // namespace tinyserve::cpu::testing
