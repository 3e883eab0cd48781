// The CUDA kernel of select_pages, on the emulator, against std::sort: the same problems as in the CPU's
// test.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "../cpu/selection_problem.h"
#include "../cpu/virtual_memory.h"
#include "cuda/select_pages.h"
#include "cuda_emulator/testing.h"
#include "device_batch.h"

using namespace tinyserve::cpu::testing;
using tinyserve::core::SelectPagesBatchParams;
using tinyserve::cuda::emulator::same_under_every_schedule;
using tinyserve::cuda::testing::DeviceBatch;

namespace {

Selection select(SelectPagesBatchParams params) {
  const int64_t num_lists = params.num_rows * params.num_kv_heads;
  Selection selection{std::vector<int32_t>(num_lists * params.max_page_budget, -77),
                      std::vector<int32_t>(num_lists, -77)};
  params.selected_pages = selection.pages.data();
  params.num_selected = selection.counts.data();
  REQUIRE(tinyserve::cuda::select_pages(params, nullptr) == cudaSuccess);
  return selection;
}

SelectPagesBatchParams params_of(const SelectionProblem& problem, const DeviceBatch& batch) {
  SelectPagesBatchParams params{.page_scores = problem.scores.data(),
                                .row_stride = problem.row_stride,
                                .batch = batch.view(),
                                .page_budget = problem.budgets.data(),
                                .num_rows = batch.cu_query_lens.back(),
                                .num_kv_heads = problem.num_kv_heads,
                                .page_size = problem.page_size,
                                .window = problem.window,
                                .num_sink_pages = problem.num_sink_pages,
                                .num_recent_pages = problem.num_recent_pages,
                                .max_page_budget = problem.max_page_budget,
                                .selected_pages = nullptr,
                                .num_selected = nullptr};
  params.batch.page_table = nullptr;
  return params;
}

DeviceBatch batch_of(const SelectionProblem& problem) {
  DeviceBatch batch(problem.row_stride);
  for (const int64_t position : problem.positions) batch.add(position, 1);
  return batch;
}

Selection select(const SelectionProblem& problem) { return select(params_of(problem, batch_of(problem))); }

Selection select_under_every_schedule(const SelectionProblem& problem) {
  return same_under_every_schedule([&] { return select(problem); });
}

void require_sorted_selection_here(uint32_t seed, const DrawScore& draw_score) {
  require_sorted_selection(seed, 60, draw_score, [](const SelectionProblem& p) { return select(p); });
  require_sorted_selection(seed + 100, 5, draw_score, select_under_every_schedule);
}

void require_same_selection(const Selection& actual, const Selection& expected) {
  require_same_bits(actual.counts, expected.counts);
  require_same_bits(actual.pages, expected.pages);
}

}  // namespace

TEST_CASE("The selection is the forced pages and the best of the rest, for random scores") {
  require_sorted_selection_here(1, draw_normal);
}

TEST_CASE("Ties go to the lower page, NaN ranks below -inf, and the zeros are equal") {
  require_sorted_selection_here(2, draw_special);
  require_sorted_selection_here(3, draw_zero);
  require_sorted_selection_here(4, draw_nan);
}

TEST_CASE("Scores that differ in any bit are told apart, for all bit patterns") {
  require_sorted_selection_here(5, draw_any_bits);
  require_sorted_selection_here(6, draw_beside_one);
  require_sorted_selection_here(7, draw_beside_zero);
}

TEST_CASE("A budget of the forced pages alone reads no scores") {
  SelectionProblem problem{.page_size = 1, .num_sink_pages = 2, .num_recent_pages = 3, .max_page_budget = 7};
  problem.positions = {99};
  problem.budgets = {5};
  problem.row_stride = 100;
  problem.scores.assign(200, std::numeric_limits<float>::quiet_NaN());
  const Selection actual = select(problem);
  REQUIRE(actual.counts == std::vector<int32_t>{5, 5});
  REQUIRE(actual.pages == std::vector<int32_t>{0, 1, 97, 98, 99, -1, -1, 0, 1, 97, 98, 99, -1, -1});
}

TEST_CASE("Budgets of one page less than there are, as many, and one more") {
  std::mt19937 random(9);
  for (const int64_t num_pages : {4, 64, 513}) {
    for (const int64_t more : {-1, 0, 1}) {
      CAPTURE(num_pages, more);
      const SelectionProblem problem =
          draw_long_row(random, num_pages, static_cast<int32_t>(num_pages + more), draw_normal);
      require_same_selection(select_under_every_schedule(problem), expected_selection(problem));
    }
  }
}

TEST_CASE("Thousands of pages, in the registers of one block and more than these hold") {
  uint32_t kind = 0;
  for (const DrawScore& draw_score : distributions_of_many()) {
    std::mt19937 random(kind++);
    for (const int64_t num_pages : {1027, 8192, 8195 + 3, 17003}) {
      for (const int32_t budget : {4, 900}) {
        CAPTURE(kind, num_pages, budget);
        const SelectionProblem problem = draw_long_row(random, num_pages, budget, draw_score);
        require_same_selection(select(problem), expected_selection(problem));
      }
    }
    const SelectionProblem problem = draw_long_row(random, 8500, 300, draw_score);
    require_same_selection(select_under_every_schedule(problem), expected_selection(problem));
  }
}

TEST_CASE("Sequences of several new tokens, of none, padding behind the last, budgets by sequence") {
  // Rows by sequence and position: the same as rows of a sequence each.
  std::mt19937 random(10);
  SelectionProblem problem{.page_size = 4, .max_page_budget = 12, .row_stride = 40};
  DeviceBatch batch(40);
  std::vector<int32_t> budgets;
  const auto add = [&](int64_t seq_len, int32_t num_new, int32_t budget) {
    batch.add(seq_len, num_new);
    budgets.push_back(budget);
    for (int32_t i = 0; i < num_new; ++i) {
      problem.positions.push_back(seq_len + i);
      problem.budgets.push_back(budget);
    }
  };
  for (int turn = 0; turn < 12; ++turn) {  // more sequences than lanes look at in one step
    add(100 + turn, 3, 5);
    add(90, 0, 4);
    add(-2, 4, 6);
    add(157, 1, 12);
  }
  const int64_t num_rows = batch.cu_query_lens.back();
  constexpr int64_t kPadding = 3;
  problem.scores.resize(static_cast<size_t>((num_rows + kPadding) * 2 * 40));
  for (float& score : problem.scores) score = draw_normal(random);
  Selection expected = expected_selection(problem);
  expected.counts.resize(expected.counts.size() + 2 * kPadding, 0);
  expected.pages.resize(expected.pages.size() + 2 * kPadding * 12, -1);

  SelectPagesBatchParams params = params_of(problem, batch);
  params.page_budget = budgets.data();
  params.num_rows = num_rows + kPadding;
  require_same_selection(same_under_every_schedule([&] { return select(params); }), expected);
}

TEST_CASE("Lengths and budgets beyond the table and the list stay within both") {
  std::mt19937 random(11);
  SelectionProblem problem = draw_long_row(random, 50, 20, draw_normal);
  const Selection expected = select(problem);
  problem.positions = {4 * 1000};  // sees the 50 pages that there are
  problem.budgets = {1000};        // as many as fit
  require_same_selection(select(problem), expected);
}

TEST_CASE("Scores and lists beyond 2^31 elements are read and written like any other") {
  constexpr int64_t kStride = (int64_t{1} << 31) + 64;
  std::mt19937 random(12);
  const SelectionProblem problem = draw_long_row(random, 100, 20, draw_normal);
  const Selection expected = expected_selection(problem);
  const VirtualMemory scores(static_cast<size_t>(2 * kStride) * sizeof(float));
  const DeviceBatch batch = batch_of(problem);
  SelectPagesBatchParams params = params_of(problem, batch);
  auto* far = static_cast<float*>(scores.begin()) + kStride;
  std::copy(problem.scores.begin(), problem.scores.end(), far);
  params.page_scores = static_cast<const float*>(scores.begin());
  params.row_stride = kStride;
  params.num_kv_heads = 2;  // the second head's scores are the far ones
  const Selection actual = select(params);
  require_same_bits(std::vector<int32_t>(actual.pages.begin() + 20, actual.pages.end()), expected.pages);
}
