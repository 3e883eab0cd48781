// select_pages against std::sort.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "drive.h"
#include "selection_problem.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::Row;

namespace {

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

void require_sorted_selection_everywhere(uint32_t seed, const DrawScore& draw_score) {
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    require_sorted_selection(seed, 300, draw_score,
                             [&](const SelectionProblem& problem) { return select(*kernels, problem); });
  }
}

}  // namespace

TEST_CASE("The selection is the forced pages and the best of the rest, for random scores") {
  require_sorted_selection_everywhere(1, draw_normal);
}

TEST_CASE("Ties go to the lower page, NaN ranks below -inf, and the zeros are equal") {
  require_sorted_selection_everywhere(2, draw_special);
  require_sorted_selection_everywhere(3, draw_zero);
  require_sorted_selection_everywhere(4, draw_nan);
}

TEST_CASE("Scores that differ in any bit are told apart, for all bit patterns") {
  require_sorted_selection_everywhere(5, draw_any_bits);
  require_sorted_selection_everywhere(6, draw_beside_one);
  require_sorted_selection_everywhere(7, draw_beside_zero);
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
  uint32_t kind = 0;
  for (const DrawScore& draw_score : distributions_of_many()) {
    std::mt19937 random(kind++);
    for (const int64_t num_pages : {1027, 5003}) {
      for (const int32_t budget : {4, 130, 900}) {
        const SelectionProblem problem = draw_long_row(random, num_pages, budget, draw_score);
        const Selection expected = expected_selection(problem);
        for (const KernelTable* kernels : targets()) {
          CAPTURE(kind, num_pages, budget, kernels->target);
          require_same_bits(select(*kernels, problem).pages, expected.pages);
        }
      }
    }
  }
}
