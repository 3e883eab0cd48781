// score_pages against the scorers' formula, applied in double precision to the numbers of the summaries.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/limits.h"
#include "summaries.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::find_scorer;
using tinyserve::core::GroupReduction;
using tinyserve::core::kScorers;
using tinyserve::core::QueryFeature;
using tinyserve::core::Scorer;

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int64_t max_pages(const PagedProblem& problem) {
  int64_t most = 0;
  for (size_t s = 0; s < problem.sequences.size(); ++s) most = std::max(most, problem.num_pages_of(s));
  return most;
}

std::vector<float> score(const KernelTable& kernels, const PagedProblem& problem, Summaries& summaries,
                         GroupReduction reduction, Schedule schedule = {}, int64_t spare_chunks = 0) {
  const Shape& shape = problem.shape;
  const int64_t width = max_pages(problem);
  const int64_t max_chunks =
      (width + tinyserve::core::kScoreChunkPages - 1) / tinyserve::core::kScoreChunkPages + spare_chunks;
  const int64_t num_row_heads = problem.num_rows() * shape.num_kv_heads;
  std::vector<float> scores(num_row_heads * width, kMinusInfinity);
  const tinyserve::core::ScorePagesParams params{.q = problem.q,
                                                 .rows = problem.rows.data(),
                                                 .num_kv_heads = shape.num_kv_heads,
                                                 .group_size = shape.group_size,
                                                 .head_dim = shape.head_dim,
                                                 .page_size = shape.page_size,
                                                 .max_chunks = max_chunks,
                                                 .page_summary = summaries.view(),
                                                 .scorer = summaries.scorer,
                                                 .group_reduction = reduction,
                                                 .sm_scale = shape.sm_scale(),
                                                 .page_scores = scores.data(),
                                                 .row_stride = width};
  run(kernels.score_pages, params, num_row_heads * max_chunks, schedule);
  return scores;
}

double feature(QueryFeature which, double q) {
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

// Score of one page for one query, and the sum of its terms' magnitudes, by which rounding is measured.
struct PageScore {
  double score = 0.0;
  double magnitude = 0.0;
};

PageScore page_score(const Summaries& summaries, int64_t page_id, int64_t head, const std::vector<double>& q,
                     double sm_scale) {
  PageScore total;
  for (int v = 0; v < summaries.scorer->num_vectors; ++v) {
    for (int64_t d = 0; d < summaries.head_dim; ++d) {
      const double term = sm_scale * summaries.scorer->vectors[v].weight *
                          feature(summaries.scorer->vectors[v].feature, q[d]) *
                          summaries.number(page_id, head, v, d);
      total.score += term;
      total.magnitude += std::fabs(term);
    }
  }
  return total;
}

void require_scores(const std::vector<float>& actual, const PagedProblem& problem, const Summaries& summaries,
                    GroupReduction reduction) {
  const Shape& shape = problem.shape;
  const int64_t width = max_pages(problem);
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    const auto [s, position] = problem.row_places[row];
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      std::vector<std::vector<double>> queries;
      for (int64_t g = 0; g < shape.group_size; ++g) {
        queries.push_back(problem.query(row, head * shape.group_size + g));
      }
      for (int64_t page = 0; page < width; ++page) {
        const float got = actual[(row * shape.num_kv_heads + head) * width + page];
        const int64_t last_token = std::min(position, (page + 1) * shape.page_size - 1);
        const bool visible = page * shape.page_size <= position && problem.sees(row, last_token);
        if (!visible || (page + 1) * shape.page_size > position + 1) {
          const float expected = visible ? -kMinusInfinity : kMinusInfinity;
          if (got != expected)
            FAIL("row " << row << ", page " << page << ": " << got << ", not " << expected);
          continue;
        }
        PageScore expected{.score = reduction == GroupReduction::kMax ? -kInfinity : 0.0};
        for (const std::vector<double>& q : queries) {
          const PageScore one =
              page_score(summaries, problem.page_tables[s][page], head, q, shape.sm_scale());
          expected.magnitude = std::max(expected.magnitude, one.magnitude);
          expected.score = reduction == GroupReduction::kMax
                               ? std::max(expected.score, one.score)
                               : expected.score + one.score / static_cast<double>(shape.group_size);
        }
        if (!(std::fabs(got - expected.score) <= 3e-6 * expected.magnitude)) {
          FAIL("row " << row << ", head " << head << ", page " << page << ": " << got << ", not "
                      << expected.score);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("Scores follow the scorer's formula, open pages score inf, pages out of sight -inf") {
  for (const Shape& shape : covering_shapes()) {
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 1);
    for (const Scorer& scorer : kScorers) {
      if (!fits(scorer, shape)) continue;
      for (const KernelTable* kernels : targets()) {
        Summaries summaries = seal(*kernels, problem, scorer);
        for (const GroupReduction reduction : {GroupReduction::kMean, GroupReduction::kMax}) {
          CAPTURE(shape, scorer.name, kernels->target, static_cast<int>(reduction));
          require_scores(score(*kernels, problem, summaries, reduction), problem, summaries, reduction);
        }
      }
    }
  }
}

TEST_CASE("A box score is no smaller than the logit of any key of its page") {
  for (const Shape& shape : covering_shapes(32)) {
    Shape plain = shape;
    plain.window = -1;
    const PagedProblem problem(plain, {{5 * plain.page_size}}, {{0, 5 * plain.page_size - 1}}, 2);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(plain, kernels->target);
      Summaries summaries = seal(*kernels, problem, *find_scorer("bounds"));
      const std::vector<float> scores = score(*kernels, problem, summaries, GroupReduction::kMax);
      for (int64_t query_head = 0; query_head < plain.num_heads(); ++query_head) {
        const int64_t head = query_head / plain.group_size;
        const std::vector<double> q = problem.query(0, query_head);
        for (int64_t token = 0; token < 5 * plain.page_size; ++token) {
          double logit = 0.0;
          for (int64_t d = 0; d < plain.head_dim; ++d) logit += q[d] * problem.key(0, head, token)[d];
          const float bound = scores[head * 5 + token / plain.page_size];
          if (!(bound >= logit * plain.sm_scale() - 1e-5))
            FAIL("token " << token << " of head " << query_head);
        }
      }
    }
  }
}

TEST_CASE("Threads, order and the number of chunks do not change a bit of the scores") {
  // More pages than one chunk holds.
  const Shape shape{.page_size = 1, .head_dim = 8, .group_size = 3};
  const PagedProblem problem(shape, {{600}, {257}, {30}}, {{0, 599}, {1, 256}, {2, 29}, {0, 300}, {2, -1}},
                             3);
  for (const KernelTable* kernels : targets()) {
    for (const Scorer& scorer : kScorers) {
      if (!fits(scorer, shape)) continue;
      Summaries summaries = seal(*kernels, problem, scorer);
      for (const GroupReduction reduction : {GroupReduction::kMean, GroupReduction::kMax}) {
        const std::vector<float> serial = score(*kernels, problem, summaries, reduction);
        require_scores(serial, problem, summaries, reduction);
        for (const Schedule& schedule : kOtherSchedules) {
          CAPTURE(kernels->target, scorer.name, schedule);
          require_same_bits(score(*kernels, problem, summaries, reduction, schedule), serial);
          require_same_bits(score(*kernels, problem, summaries, reduction, schedule, 2), serial);
        }
      }
    }
  }
}

TEST_CASE("A NaN query gives NaN scores to its own group and to no other") {
  const Shape shape{.type = ElementType::kFloat16, .page_size = 16, .head_dim = 40, .group_size = 4};
  for (const int64_t bad_head : {4, 5, 7}) {
    PagedProblem problem(shape, {{64}}, {{0, 63}}, 4);
    problem.set_query(0, bad_head, 17, kNan);
    for (const KernelTable* kernels : targets()) {
      for (const Scorer& scorer : kScorers) {
        if (!fits(scorer, shape)) continue;
        Summaries summaries = seal(*kernels, problem, scorer);
        for (const GroupReduction reduction : {GroupReduction::kMean, GroupReduction::kMax}) {
          CAPTURE(kernels->target, scorer.name, bad_head, static_cast<int>(reduction));
          const std::vector<float> scores = score(*kernels, problem, summaries, reduction);
          for (int page = 0; page < 4; ++page) {
            REQUIRE(std::isfinite(scores[page]));
            REQUIRE(std::isnan(scores[4 + page]));
          }
        }
      }
    }
  }
}
