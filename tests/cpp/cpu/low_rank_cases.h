// Pages to fit low-rank summaries to, and what a summary promises of them: for the tests on the CPU and in
// CUDA. seal_by(problem, scorer) makes the summaries of all full pages.
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "summaries.h"

namespace tinyserve::cpu::testing {

using Page = std::vector<std::vector<double>>;  // [page_size][head_dim]

// Replaces the keys of the only page.
inline void set_keys(PagedProblem& problem, const Page& keys) {
  for (size_t t = 0; t < keys.size(); ++t) {
    for (size_t d = 0; d < keys[t].size(); ++d) {
      problem.set_key(0, 0, static_cast<int64_t>(t), static_cast<int64_t>(d), keys[t][d]);
    }
  }
}

// Keys whose distances from their mean have `rank` directions, each half as long as the last.
inline Page low_rank_page(const Shape& shape, int rank, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](int64_t n) {
    std::vector<double> x(static_cast<size_t>(n));
    for (double& one : x) one = normal(random);
    return x;
  };
  const std::vector<double> mean = draw(shape.head_dim);
  Page page(static_cast<size_t>(shape.page_size), mean);
  for (int r = 0; r < rank; ++r) {
    const std::vector<double> direction = draw(shape.head_dim);
    const std::vector<double> along = draw(shape.page_size);
    for (int64_t t = 0; t < shape.page_size; ++t) {
      for (int64_t d = 0; d < shape.head_dim; ++d) page[t][d] += std::ldexp(along[t] * direction[d], -r);
    }
  }
  return page;
}

inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
  return std::sqrt(sum);
}

// The error of the restored keys relative to their spread around the mean.
inline double restoring_error(const Summaries& summaries, int64_t page_id, const Page& keys) {
  const Sketch sketch = read_sketch(summaries, page_id, 0);
  std::vector<double> mean(keys[0].size());
  for (const std::vector<double>& key : keys) {
    for (size_t d = 0; d < mean.size(); ++d) mean[d] += key[d] / static_cast<double>(keys.size());
  }
  double error = 0.0;
  double spread = 0.0;
  for (size_t t = 0; t < keys.size(); ++t) {
    error += std::pow(distance(sketch.key(static_cast<int64_t>(t)), keys[t]), 2);
    spread += std::pow(distance(mean, keys[t]), 2);
  }
  return std::sqrt(error / spread);
}

// Keys that have no more directions than the summary are restored within the error of int4.
template <typename Seal>
void require_restored_keys(int64_t page_size, int64_t head_dim, int rank, const Seal& seal_by) {
  const Shape shape{.page_size = page_size, .head_dim = head_dim, .num_kv_heads = 1};
  CAPTURE(shape, rank);
  PagedProblem problem(shape, {{page_size}}, {{0, page_size - 1}}, 1);
  const Page keys = low_rank_page(shape, rank, 2);
  set_keys(problem, keys);
  const Summaries summaries = seal_by(problem, *core::find_scorer("low_rank_" + std::to_string(rank)));
  REQUIRE(restoring_error(summaries, problem.page_tables[0][0], keys) < 0.35);
}

// A key far from the others is restored before the others.
template <typename Seal>
void require_outlier_first(const Seal& seal_by) {
  const Shape shape{.page_size = 16, .head_dim = 64, .num_kv_heads = 1};
  PagedProblem problem(shape, {{16}}, {{0, 15}}, 3);
  Page keys = low_rank_page(shape, 15, 4);
  for (double& x : keys[11]) x *= 6.0;
  set_keys(problem, keys);
  const Summaries summaries = seal_by(problem, *core::find_scorer("low_rank_1"));
  const Sketch sketch = read_sketch(summaries, problem.page_tables[0][0], 0);
  REQUIRE(distance(sketch.key(11), keys[11]) < 0.2 * distance(keys[11], std::vector<double>(64)));
}

// Keys by token and channel, among them such as are no numbers.
struct OddPage {
  std::string name;
  std::function<double(int64_t, int64_t)> key;
};
inline std::vector<OddPage> odd_pages() {
  return {
      {"zero", [](int64_t, int64_t) { return 0.0; }},
      {"equal", [](int64_t, int64_t d) { return 0.1 * static_cast<double>(d); }},
      {"one NaN", [](int64_t t, int64_t d) { return t == 1 && d == 2 ? kNan : static_cast<double>(t * d); }},
      {"all NaN", [](int64_t, int64_t) { return kNan; }},
      {"infinite", [](int64_t t, int64_t d) { return (t + d) % 3 == 0 ? kInfinity : -kInfinity; }},
      {"one infinity",
       [](int64_t t, int64_t d) { return t == 0 && d == 0 ? kInfinity : 1.0 + static_cast<double>(t); }},
      {"1e30", [](int64_t t, int64_t d) { return 1e30 * std::sin(static_cast<double>(7 * t + d)); }},
      {"1e-30", [](int64_t t, int64_t d) { return 1e-30 * std::sin(static_cast<double>(7 * t + d)); }},
      {"subnormal", [](int64_t t, int64_t d) { return 1e-42 * static_cast<double>(t + d); }},
      {"6e4", [](int64_t t, int64_t d) { return (t + d) % 2 == 0 ? 6e4 : -6e4; }},
      {"largest", [](int64_t t, int64_t) { return t % 2 == 0 ? 3.4e38 : -3.4e38; }},
      {"outlier",
       [](int64_t t, int64_t d) { return t == 3 && d == 5 ? 1e6 : std::sin(static_cast<double>(t)); }},
  };
}

// Whatever the keys are, scales are finite, codes in range, and no byte is left over.
template <typename Seal>
void require_well_formed(const OddPage& page, int64_t page_size, const core::Scorer& scorer,
                         const Seal& seal_by) {
  const Shape shape{.page_size = page_size, .head_dim = 40, .num_kv_heads = 1};
  CAPTURE(page_size, page.name, scorer.name);
  PagedProblem problem(shape, {{page_size}}, {{0, page_size - 1}}, 5);
  for (int64_t t = 0; t < page_size; ++t) {
    for (int64_t d = 0; d < 40; ++d) problem.set_key(0, 0, t, d, page.key(t, d));
  }
  const Summaries summaries = seal_by(problem, scorer);
  const int32_t page_id = problem.page_tables[0][0];
  const Sketch sketch = read_sketch(summaries, page_id, 0);
  for (const double x : sketch.mean) REQUIRE(std::isfinite(x));
  for (int r = 0; r < scorer.rank; ++r) {
    for (const double x : sketch.basis[r]) REQUIRE(std::fabs(x) <= 7.0);
    for (const double x : sketch.coefficients[r]) REQUIRE(std::isfinite(x));
  }
  const uint8_t* row = summaries.row(page_id, 0);
  const int64_t coefficient_bytes = (page_size + 15) / 16 * 8;
  for (int r = 0; r < scorer.rank; ++r) {
    const uint8_t* basis = row + 40 + r * 24;
    const uint8_t* coefficients = row + 40 + scorer.rank * 24 + r * coefficient_bytes;
    for (int64_t d = 40; d < 48; ++d) REQUIRE(int4_code(basis, d) == 0);
    for (int64_t t = page_size; t < 2 * coefficient_bytes; ++t) REQUIRE(int4_code(coefficients, t) == 0);
  }
  const int64_t used = 40 + scorer.rank * (24 + coefficient_bytes) + 2 * (1 + scorer.rank);
  for (int64_t i = used; i < summaries.row_bytes(); ++i) REQUIRE(row[i] == 0);
}

// Scaling the keys by a power of two scales the summary and changes no code.
template <typename Seal>
void require_scaled_by_powers_of_two(const Seal& seal_by) {
  const Shape shape{.page_size = 16, .head_dim = 64, .num_kv_heads = 1};
  PagedProblem plain(shape, {{16}}, {{0, 15}}, 6);
  PagedProblem scaled(shape, {{16}}, {{0, 15}}, 6);
  const Page keys = low_rank_page(shape, 15, 7);
  Page large = keys;
  for (std::vector<double>& key : large) {
    for (double& x : key) x *= 0x1p90;
  }
  set_keys(plain, keys);
  set_keys(scaled, large);
  const Summaries one = seal_by(plain, *core::find_scorer("low_rank_2"));
  const Summaries other = seal_by(scaled, *core::find_scorer("low_rank_2"));
  const Sketch a = read_sketch(one, plain.page_tables[0][0], 0);
  const Sketch b = read_sketch(other, scaled.page_tables[0][0], 0);
  for (int64_t t = 0; t < 16; ++t) {
    std::vector<double> key = a.key(t);
    for (double& x : key) x *= 0x1p90;
    REQUIRE(key == b.key(t));
  }
}

}  // namespace tinyserve::cpu::testing
