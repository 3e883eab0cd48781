// Page lists for the tests of attend_pages, as a selection might make them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "attention_oracle.h"

namespace tinyserve::cpu::testing {

// Random ascending subsets of each row's visible pages, its last page always among them.
inline PageLists draw_lists(const PagedProblem& problem, int64_t width, uint32_t seed) {
  std::mt19937 random(seed);
  PageLists lists{.width = width, .pages = {}, .counts = {}};
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    for (int64_t head = 0; head < problem.shape.num_kv_heads; ++head) {
      const std::vector<int64_t> visible = pages_of(problem, nullptr, row, head);
      std::vector<int64_t> chosen;
      if (!visible.empty()) {
        std::sample(visible.begin(), visible.end() - 1, std::back_inserter(chosen), width - 1, random);
        chosen.push_back(visible.back());
      }
      lists.counts.push_back(static_cast<int32_t>(chosen.size()));
      chosen.resize(width, -1);
      lists.pages.insert(lists.pages.end(), chosen.begin(), chosen.end());
    }
  }
  return lists;
}

inline PageLists full_lists(const PagedProblem& problem, int64_t width) {
  return draw_lists(problem, width, 1);
}

}  // namespace tinyserve::cpu::testing
