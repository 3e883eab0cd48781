// Rows of page scores with budgets and forced pages, and what std::sort selects of them, for the tests of
// select_pages on the CPU and in CUDA.
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "elements.h"

namespace tinyserve::cpu::testing {

struct Selection {
  std::vector<int32_t> pages;
  std::vector<int32_t> counts;
  bool operator==(const Selection&) const = default;
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

// Sorts all visible pages by (forced, score, page), takes the budget, sorts those by page.
inline Selection expected_selection(const SelectionProblem& problem) {
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

// Compares with select(problem) for num_rounds problems.
template <typename DrawScore, typename Select>
void require_sorted_selection(uint32_t seed, int num_rounds, const DrawScore& draw_score,
                              const Select& select) {
  std::mt19937 random(seed);
  for (int round = 0; round < num_rounds; ++round) {
    const SelectionProblem problem = draw_problem(random, [&] { return draw_score(random); });
    CAPTURE(seed, round, problem.page_size, problem.window, problem.num_sink_pages, problem.num_recent_pages);
    const Selection expected = expected_selection(problem);
    const Selection actual = select(problem);
    require_same_bits(actual.counts, expected.counts);
    require_same_bits(actual.pages, expected.pages);
  }
}

// ---- Distributions of scores
// -----------------------------------------------------------------------------------------------

using DrawScore = std::function<float(std::mt19937&)>;

inline float draw_normal(std::mt19937& random) { return std::normal_distribution<float>()(random); }

// Infinities, NaN and the two zeros among numbers.
inline float draw_special(std::mt19937& random) {
  constexpr float kFew[] = {-std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::quiet_NaN(),
                            0.0F,
                            -0.0F,
                            1.0F,
                            -1.0F};
  return kFew[random() % std::size(kFew)];
}
inline float draw_zero(std::mt19937& random) { return random() % 2 == 0 ? 0.0F : -0.0F; }
inline float draw_nan(std::mt19937&) { return std::numeric_limits<float>::quiet_NaN(); }

inline float draw_any_bits(std::mt19937& random) {
  return std::bit_cast<float>(static_cast<uint32_t>(random()));
}
// Neighbours in the last bits, around a power of two and around zero.
inline float draw_beside_one(std::mt19937& random) {
  return std::bit_cast<float>(0x3f800000U - 1500U + static_cast<uint32_t>(random() % 3000U));
}
inline float draw_beside_zero(std::mt19937& random) {
  return std::bit_cast<float>((random() % 2 == 0 ? 0x80000000U : 0U) | static_cast<uint32_t>(random() % 40U));
}

// Spread out, crowded beside an outlier, equal, three values, at the ends of the range, some infinite.
inline std::vector<DrawScore> distributions_of_many() {
  const auto normal = [](std::mt19937& random) {
    return std::normal_distribution<float>(-20.0F, 3.0F)(random);
  };
  const auto crowded = [=](std::mt19937& random) {
    return random() % 3000 == 0 ? -1.0e30F : 1.0e-3F * normal(random);
  };
  const auto equal = [](std::mt19937&) { return 2.5F; };
  const auto three = [](std::mt19937& random) { return static_cast<float>(random() % 3); };
  const auto extreme = [](std::mt19937& random) {
    return std::ldexp(random() % 2 == 0 ? 1.9F : -1.9F, 127 - static_cast<int>(random() % 3));
  };
  const auto infinite = [=](std::mt19937& random) {
    return random() % 1000 == 0 ? -std::numeric_limits<float>::infinity() : normal(random);
  };
  return {normal, crowded, equal, three, extreme, infinite};
}

// One row of whole pages.
inline SelectionProblem draw_long_row(std::mt19937& random, int64_t num_pages, int32_t budget,
                                      const DrawScore& draw_score) {
  SelectionProblem problem{.page_size = 4, .num_kv_heads = 1, .max_page_budget = budget};
  problem.positions = {4 * num_pages - 1};
  problem.budgets = {budget};
  problem.row_stride = num_pages;
  for (int64_t page = 0; page < num_pages; ++page) problem.scores.push_back(draw_score(random));
  return problem;
}

}  // namespace tinyserve::cpu::testing
