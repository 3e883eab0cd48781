// score_pages and join_scores against the scorers' formula, applied in double precision to the numbers of the
// summaries.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/limits.h"
#include "score_oracle.h"
#include "summaries.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::find_scorer;
using tinyserve::core::kScorers;

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

std::vector<float> score(const KernelTable& kernels, const PagedProblem& problem, Summaries& summaries,
                         GroupReduction reduction, Schedule schedule = {}, int64_t spare_chunks = 0) {
  const Shape& shape = problem.shape;
  const int64_t width = max_pages(problem);
  const int64_t max_chunks =
      (width + tinyserve::core::kScoreChunkPages - 1) / tinyserve::core::kScoreChunkPages + spare_chunks;
  const int64_t num_row_heads = problem.num_rows() * shape.num_kv_heads;
  std::vector<float> scores(num_row_heads * width, kMinusInfinity);
  std::vector<float> head_scores(num_row_heads * shape.group_size * width, std::nanf(""));
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
                                                 .head_scores = head_scores.data(),
                                                 .row_stride = width};
  run(kernels.score_pages, params, num_row_heads * max_chunks, schedule);
  run(kernels.join_scores, params, num_row_heads, schedule);
  return scores;
}

}  // namespace

TEST_CASE("Scores follow the scorer's formula, open pages score inf, pages out of sight -inf") {
  int turn = 0;
  for (const Shape& shape : covering_shapes()) {
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 1);
    ++turn;
    for (const Scorer& scorer : kScorers) {
      // Every shape meets a quarter of the ranks.
      if (!fits(scorer, shape) || scorer.rank % 4 != (scorer.linear() ? 0 : turn % 4)) continue;
      for (const KernelTable* kernels : targets()) {
        Summaries summaries = seal(*kernels, problem, scorer);
        for (const GroupReduction reduction : kReductions) {
          if (!exists(scorer, reduction)) continue;
          CAPTURE(shape, scorer.name, kernels->target, static_cast<int>(reduction));
          require_scores(score(*kernels, problem, summaries, reduction), problem, summaries, reduction);
        }
      }
    }
  }
}

TEST_CASE("Scores of any number of query heads and kv heads follow the formula") {
  // More than go through the pages at once: many kv heads, many query heads of each, and both.
  struct Heads {
    int64_t num_kv_heads;
    int64_t group_size;
  };
  for (const auto& [num_kv_heads, group_size] : {Heads{35, 1}, Heads{1, 70}, Heads{7, 9}}) {
    for (const int64_t head_dim : {8, 256}) {
      const Shape shape{
          .page_size = 6, .head_dim = head_dim, .group_size = group_size, .num_kv_heads = num_kv_heads};
      const PagedProblem problem(shape, {{200}, {50}}, {{0, 199}, {1, 48}}, 7);
      for (const char* name : {"bounds", "mean_std", "low_rank_4"}) {
        const Scorer& scorer = *find_scorer(name);
        for (const KernelTable* kernels : targets()) {
          Summaries summaries = seal(*kernels, problem, scorer);
          for (const GroupReduction reduction : kReductions) {
            if (!exists(scorer, reduction)) continue;
            CAPTURE(shape, num_kv_heads, name, kernels->target, static_cast<int>(reduction));
            const std::vector<float> scores = score(*kernels, problem, summaries, reduction);
            require_scores(scores, problem, summaries, reduction);
            for (const Schedule& schedule : kOtherSchedules) {
              require_same_bits(score(*kernels, problem, summaries, reduction, schedule), scores);
            }
          }
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
  const Shape shape{.page_size = 2, .head_dim = 8, .group_size = 3};
  const PagedProblem problem(shape, {{1200}, {515}, {60}}, {{0, 1199}, {1, 514}, {2, 59}, {0, 600}, {2, -1}},
                             3);
  for (const KernelTable* kernels : targets()) {
    for (const Scorer& scorer : kScorers) {
      if (!fits(scorer, shape)) continue;
      Summaries summaries = seal(*kernels, problem, scorer);
      for (const GroupReduction reduction : kReductions) {
        if (!exists(scorer, reduction)) continue;
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
        for (const GroupReduction reduction : kReductions) {
          if (!exists(scorer, reduction)) continue;
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

TEST_CASE("Low-rank scores follow the formula for every head dim, page size and group size") {
  for (const int64_t head_dim : {8, 24, 40, 80, 128, 248, 256}) {
    for (const int64_t page_size : {2, 5, 16, 17, 33, 64}) {
      const Shape shape{
          .page_size = page_size, .head_dim = head_dim, .group_size = head_dim % 16 == 0 ? 16 : 5};
      const PagedProblem problem(shape, {{5 * page_size}}, {{0, 5 * page_size - 1}}, 6);
      for (const Scorer& scorer : kScorers) {
        if (scorer.linear() || !fits(scorer, shape)) continue;
        for (const KernelTable* kernels : targets()) {
          CAPTURE(shape, scorer.name, kernels->target);
          Summaries summaries = seal(*kernels, problem, scorer);
          require_scores(score(*kernels, problem, summaries, GroupReduction::kSoftmax), problem, summaries,
                         GroupReduction::kSoftmax);
        }
      }
    }
  }
}

TEST_CASE("Joined scores of infinite and undefined head scores are those of the limits") {
  // [head][page]; the group has two heads. More pages than a vector, and not whole vectors of them.
  constexpr int64_t kPages = 11;
  const auto join = [&](const KernelTable& kernels, std::vector<std::vector<float>> heads) {
    const Shape shape{.page_size = 1, .head_dim = 8, .group_size = 2, .num_kv_heads = 1};
    const PagedProblem problem(shape, {{kPages}}, {{0, kPages - 1}}, 7);
    std::vector<float> scores(kPages);
    for (std::vector<float>& head : heads) head.resize(kPages, -2.0F);
    std::vector<float> head_scores = heads[0];
    head_scores.insert(head_scores.end(), heads[1].begin(), heads[1].end());
    tinyserve::core::ScorePagesParams params{};
    params.rows = problem.rows.data();
    params.num_kv_heads = 1;
    params.group_size = 2;
    params.page_size = 1;
    params.group_reduction = GroupReduction::kSoftmax;
    params.page_scores = scores.data();
    params.head_scores = head_scores.data();
    params.row_stride = kPages;
    run(kernels.join_scores, params, 1);
    return scores;
  };
  const float infinity = -kMinusInfinity;
  const std::vector<float> nothing(kPages, kMinusInfinity);
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    // No head has anything to give: no NaN.
    for (const float x : join(*kernels, {nothing, nothing})) REQUIRE(x == kMinusInfinity);
    // One head has: the score is its share alone.
    std::vector<float> scores = join(*kernels, {nothing, {3.0F, kMinusInfinity}});
    double total = 0.0;
    for (int page = 0; page < kPages; ++page) total += std::exp(scores[page]);
    REQUIRE(std::fabs(total - 1.0) < 1e-5);
    REQUIRE(scores[1] == kMinusInfinity);
    REQUIRE(scores[0] > scores[2]);
    // A NaN makes its own page NaN and no other.
    scores = join(*kernels, {{1.0F, std::nanf("")}, {1.0F}});
    REQUIRE(std::isnan(scores[1]));
    for (int page = 0; page < kPages; ++page) REQUIRE((page == 1 || std::isfinite(scores[page])));
    // A page at +inf takes all of its head's share.
    scores = join(*kernels, {{infinity}, {0.0F}});
    REQUIRE(scores[0] > 0.0F);
    for (int page = 1; page < kPages; ++page) REQUIRE((std::isfinite(scores[page]) && scores[page] < 0.0F));
    // Far apart, but still told apart.
    scores = join(*kernels, {{1e4F, -1e4F, -1.1e4F}, {1e4F, -1e4F, -1.1e4F}});
    REQUIRE(scores[1] > scores[2]);
    REQUIRE(std::isfinite(scores[2]));
  }
}
