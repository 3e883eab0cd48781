// select_pages against std::sort.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "drive.h"
#include "elements.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::Row;

namespace {

struct Selection {
  std::vector<int32_t> pages;
  std::vector<int32_t> counts;
};

struct SelectionProblem {
  int64_t page_size = 16;
  int64_t window = -1;
  int64_t num_sink_pages = 1;
  int64_t num_recent_pages = 2;
  int64_t num_kv_heads = 2;
  int64_t max_page_budget = 0;
  int64_t row_stride = 0;
  std::vector<int64_t> positions = {};  // one row a sequence
  std::vector<int32_t> budgets = {};
  std::vector<float> scores = {};  // [num_rows, num_kv_heads, row_stride]
};

Selection select(const KernelTable& kernels, const SelectionProblem& problem, Schedule schedule = {}) {
  std::vector<Row> rows;
  for (size_t r = 0; r < problem.positions.size(); ++r) {
    rows.push_back(
        tinyserve::core::make_row(nullptr, static_cast<int32_t>(r), problem.positions[r], problem.window));
  }
  const int64_t num_items = static_cast<int64_t>(rows.size()) * problem.num_kv_heads;
  Selection result{std::vector<int32_t>(num_items * problem.max_page_budget, -77),
                   std::vector<int32_t>(num_items, -77)};
  const tinyserve::core::SelectPagesParams params{.page_scores = problem.scores.data(),
                                                  .row_stride = problem.row_stride,
                                                  .rows = rows.data(),
                                                  .page_budget = problem.budgets.data(),
                                                  .num_kv_heads = problem.num_kv_heads,
                                                  .page_size = problem.page_size,
                                                  .num_sink_pages = problem.num_sink_pages,
                                                  .num_recent_pages = problem.num_recent_pages,
                                                  .max_page_budget = problem.max_page_budget,
                                                  .selected_pages = result.pages.data(),
                                                  .num_selected = result.counts.data()};
  run(kernels.select_pages, params, num_items, schedule);
  return result;
}

// Sorts all visible pages by (forced, score, page), takes the budget, sorts those by page.
Selection expected_selection(const SelectionProblem& problem) {
  Selection expected;
  for (size_t r = 0; r < problem.positions.size(); ++r) {
    for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
      const float* scores = problem.scores.data() +
                            (static_cast<int64_t>(r) * problem.num_kv_heads + head) * problem.row_stride;
      const int64_t position = problem.positions[r];
      std::vector<int32_t> visible;
      for (int64_t page = 0; page * problem.page_size <= position; ++page) {
        const int64_t last_token = std::min(position, (page + 1) * problem.page_size - 1);
        if (problem.window <= 0 || last_token > position - problem.window) {
          visible.push_back(static_cast<int32_t>(page));
        }
      }
      const auto forced = [&](int32_t page) {
        return page < problem.num_sink_pages || page > visible.back() - problem.num_recent_pages;
      };
      std::vector<int32_t> ranked = visible;
      std::ranges::sort(ranked, [&](int32_t a, int32_t b) {
        if (forced(a) != forced(b)) return forced(a);
        const bool a_nan = std::isnan(scores[a]);
        const bool b_nan = std::isnan(scores[b]);
        if (a_nan != b_nan) return b_nan;
        if (!a_nan && scores[a] != scores[b]) return scores[a] > scores[b];
        return a < b;
      });
      if (static_cast<int64_t>(ranked.size()) > problem.budgets[r]) ranked.resize(problem.budgets[r]);
      std::ranges::sort(ranked);
      expected.counts.push_back(static_cast<int32_t>(ranked.size()));
      ranked.resize(problem.max_page_budget, -1);
      expected.pages.insert(expected.pages.end(), ranked.begin(), ranked.end());
    }
  }
  return expected;
}

template <typename DrawScore>
SelectionProblem draw_problem(std::mt19937& random, const DrawScore& draw_score) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  constexpr int64_t kPageSizes[] = {1, 7, 16, 64};
  SelectionProblem problem{
      .page_size = kPageSizes[below(4)], .num_sink_pages = below(4), .num_recent_pages = 1 + below(3)};
  problem.window = below(3) == 0 ? 1 + below(40 * problem.page_size) : -1;
  problem.row_stride = 1 + below(80);
  const int64_t forced = problem.num_sink_pages + problem.num_recent_pages;
  problem.max_page_budget = forced + below(40);
  for (int row = 0; row < 4; ++row) {
    problem.positions.push_back(below(5) == 0 ? -1 - below(3)
                                              : below(problem.row_stride * problem.page_size));
    problem.budgets.push_back(static_cast<int32_t>(forced + below(problem.max_page_budget - forced + 1)));
  }
  problem.scores.resize(4 * problem.num_kv_heads * problem.row_stride);
  for (float& score : problem.scores) score = draw_score();
  return problem;
}

template <typename DrawScore>
void require_sorted_selection(uint32_t seed, const DrawScore& draw_score) {
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const SelectionProblem problem = draw_problem(random, [&] { return draw_score(random); });
    CAPTURE(seed, round, problem.page_size, problem.window, problem.num_sink_pages, problem.num_recent_pages);
    const Selection expected = expected_selection(problem);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Selection actual = select(*kernels, problem);
      require_same_bits(actual.counts, expected.counts);
      require_same_bits(actual.pages, expected.pages);
    }
  }
}

}  // namespace

TEST_CASE("The selection is the forced pages and the best of the rest, for random scores") {
  require_sorted_selection(1, [](std::mt19937& random) { return std::normal_distribution<float>()(random); });
}

TEST_CASE("Ties go to the lower page, NaN ranks below -inf, and the zeros are equal") {
  constexpr float kFew[] = {-std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::quiet_NaN(),
                            0.0F,
                            -0.0F,
                            1.0F,
                            -1.0F};
  require_sorted_selection(2, [&](std::mt19937& random) { return kFew[random() % std::size(kFew)]; });
  require_sorted_selection(3, [](std::mt19937& random) { return random() % 2 == 0 ? 0.0F : -0.0F; });
  require_sorted_selection(4, [](std::mt19937&) { return std::numeric_limits<float>::quiet_NaN(); });
}

TEST_CASE("Scores that differ in any bit are told apart, for all bit patterns") {
  require_sorted_selection(
      5, [](std::mt19937& random) { return std::bit_cast<float>(static_cast<uint32_t>(random())); });
  // Neighbours in the last bits, around a power of two and around zero.
  require_sorted_selection(6, [](std::mt19937& random) {
    return std::bit_cast<float>(0x3f800000U - 1500U + static_cast<uint32_t>(random() % 3000U));
  });
  require_sorted_selection(7, [](std::mt19937& random) {
    return std::bit_cast<float>((random() % 2 == 0 ? 0x80000000U : 0U) |
                                static_cast<uint32_t>(random() % 40U));
  });
}

TEST_CASE("A budget of the forced pages alone reads no scores") {
  SelectionProblem problem{.page_size = 1, .num_sink_pages = 2, .num_recent_pages = 3, .max_page_budget = 7};
  problem.positions = {99};
  problem.budgets = {5};
  problem.row_stride = 100;
  problem.scores.assign(200, std::numeric_limits<float>::quiet_NaN());
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    const Selection actual = select(*kernels, problem);
    REQUIRE(actual.counts == std::vector<int32_t>{5, 5});
    REQUIRE(actual.pages == std::vector<int32_t>{0, 1, 97, 98, 99, -1, -1, 0, 1, 97, 98, 99, -1, -1});
  }
}

TEST_CASE("Threads and order do not change the selection") {
  std::mt19937 random(8);
  for (int round = 0; round < 20; ++round) {
    const SelectionProblem problem =
        draw_problem(random, [&] { return static_cast<float>(static_cast<int>(random() % 5)); });
    for (const KernelTable* kernels : targets()) {
      const Selection serial = select(*kernels, problem);
      for (const Schedule& schedule : kOtherSchedules) {
        CAPTURE(round, kernels->target, schedule);
        const Selection other = select(*kernels, problem, schedule);
        require_same_bits(other.pages, serial.pages);
        require_same_bits(other.counts, serial.counts);
      }
    }
  }
}

TEST_CASE("Thousands of pages: spread out, crowded beside an outlier, equal, at the ends of the range") {
  const auto normal = [](std::mt19937& random) {
    return std::normal_distribution<float>(-20.0F, 3.0F)(random);
  };
  const auto crowded = [&](std::mt19937& random) {
    return random() % 3000 == 0 ? -1.0e30F : 1.0e-3F * normal(random);
  };
  const auto equal = [](std::mt19937&) { return 2.5F; };
  const auto extreme = [](std::mt19937& random) {
    return std::ldexp(random() % 2 == 0 ? 1.9F : -1.9F, 127 - static_cast<int>(random() % 3));
  };
  const auto infinite = [&](std::mt19937& random) {
    return random() % 1000 == 0 ? -std::numeric_limits<float>::infinity() : normal(random);
  };
  const std::function<float(std::mt19937&)> distributions[] = {normal, crowded, equal, extreme, infinite};
  for (uint32_t kind = 0; kind < std::size(distributions); ++kind) {
    std::mt19937 random(kind);
    for (const int64_t num_pages : {1027, 5003}) {
      for (const int32_t budget : {4, 130, 900}) {
        SelectionProblem problem{.page_size = 4, .num_kv_heads = 1, .max_page_budget = budget};
        problem.positions = {4 * num_pages - 1};
        problem.budgets = {budget};
        problem.row_stride = num_pages;
        for (int64_t page = 0; page < num_pages; ++page) {
          problem.scores.push_back(distributions[kind](random));
        }
        const Selection expected = expected_selection(problem);
        for (const KernelTable* kernels : targets()) {
          CAPTURE(kind, num_pages, budget, kernels->target);
          require_same_bits(select(*kernels, problem).pages, expected.pages);
        }
      }
    }
  }
}
