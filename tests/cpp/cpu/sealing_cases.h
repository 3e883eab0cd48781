// Keys to summarise, and what a page's bounds promise of them: for the tests of sealing on the CPU and in
// CUDA.
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "summaries.h"

namespace tinyserve::cpu::testing {

using core::kScorers;
using core::PageStatistic;
using core::Scorer;
using core::SummaryEncoding;

inline constexpr float kLargest = std::numeric_limits<float>::max();

// One sequence of full pages, its keys replaced by a distribution.
struct Keys {
  std::string name;
  std::function<double(std::mt19937&)> draw;
};

inline std::vector<Keys> distributions() {
  const auto normal = [](double mean, double deviation) {
    return [=](std::mt19937& random) { return std::normal_distribution<double>(mean, deviation)(random); };
  };
  return {{"normal", normal(0.0, 1.0)},
          {"one-sided", normal(40.0, 2.0)},
          {"negative", normal(-3.0, 0.1)},
          {"heavy tail", [](std::mt19937& random) { return std::cauchy_distribution<double>()(random); }},
          {"integers", [](std::mt19937& random) { return static_cast<double>(random() % 255) - 127.0; }},
          {"tiny", normal(0.0, 1e-43)},
          {"smallest", [](std::mt19937& random) { return 0x1p-149 * static_cast<double>(random() % 300); }},
          {"large", normal(0.0, 1e38)},
          {"largest", [](std::mt19937& random) { return random() % 2 == 0 ? kLargest : -kLargest; }},
          {"constant", [](std::mt19937&) { return 0.1; }},
          {"zero", [](std::mt19937& random) { return random() % 2 == 0 ? 0.0 : -0.0; }}};
}

// Far past the largest number of a 16-bit type a key becomes infinite, which a summary clamps: not here.
inline double within(ElementType type, double x) {
  if (type == ElementType::kFloat16) return std::clamp(x, -65504.0, 65504.0);
  if (type == ElementType::kInt8) return std::clamp(x, -3.4e38, 3.4e38);  // scale * 127 stays finite
  const double largest = type == ElementType::kFloat32 ? kLargest : 0x1.fep127;
  return std::clamp(x, -largest, largest);
}

inline void replace_keys(PagedProblem& problem, const Keys& keys, uint32_t seed) {
  std::mt19937 random(seed);
  for (int64_t head = 0; head < problem.shape.num_kv_heads; ++head) {
    for (int64_t token = 0; token < problem.sequences[0].length; ++token) {
      const ElementType type = problem.shape.type;
      std::vector<double> row(static_cast<size_t>(problem.shape.head_dim));
      for (double& x : row) x = rounded_to(problem.shape.query_type(), within(type, keys.draw(random)));
      problem.set_key_row(0, head, token, row);
    }
  }
}

struct Channel {
  int64_t page_id;
  int64_t head;
  int64_t d;
  std::vector<double> keys;

  double max() const { return *std::ranges::max_element(keys); }
  double min() const { return *std::ranges::min_element(keys); }
  double mean() const {
    double sum = 0.0;
    for (const double key : keys) sum += key;
    return sum / static_cast<double>(keys.size());
  }
  double deviation() const {
    double squares = 0.0;
    for (const double key : keys) squares += (key - mean()) * (key - mean());
    return std::sqrt(squares / static_cast<double>(keys.size()));
  }
};

template <typename F>
void for_each_channel(const PagedProblem& problem, const F& f) {
  const int64_t page_size = problem.shape.page_size;
  for (int64_t page = 0; page < problem.sequences[0].length / page_size; ++page) {
    for (int64_t head = 0; head < problem.shape.num_kv_heads; ++head) {
      for (int64_t d = 0; d < problem.shape.head_dim; ++d) {
        Channel channel{problem.page_tables[0][page], head, d, {}};
        for (int64_t t = 0; t < page_size; ++t) {
          channel.keys.push_back(problem.key(0, head, page * page_size + t)[d]);
        }
        f(channel);
      }
    }
  }
}

inline std::vector<Shape> sealing_shapes() {
  std::vector<Shape> shapes;
  for (Shape shape : covering_shapes(32)) {
    shape.window = -1;
    shapes.push_back(shape);
  }
  return shapes;
}

inline PagedProblem full_pages(const Shape& shape, uint32_t seed) {
  return PagedProblem(shape, {{3 * shape.page_size}}, {{0, 3 * shape.page_size - 1}}, seed);
}

// int8 bounds hold exactly in fp32 and are as tight as a code allows.
inline void require_tight_bounds(const Summaries& summaries, const PagedProblem& problem) {
  for_each_channel(problem, [&](const Channel& c) {
    const float upper = summaries.number(c.page_id, c.head, 0, c.d);
    const float lower = summaries.number(c.page_id, c.head, 1, c.d);
    if (!(upper >= c.max() && lower <= c.min())) {
      FAIL("[" << lower << ", " << upper << "] does not hold [" << c.min() << ", " << c.max() << "]");
    }
    const float max_scale = summaries.scale(c.page_id, c.head, 0);
    const float min_scale = summaries.scale(c.page_id, c.head, 1);
    const int max_code = summaries.code(c.page_id, c.head, 0, c.d);
    const int min_code = summaries.code(c.page_id, c.head, 1, c.d);
    const bool tight_max =
        max_scale == 0.0F || max_code == -127 || max_scale * static_cast<float>(max_code - 1) < c.max();
    const bool tight_min =
        min_scale == 0.0F || min_code == 127 || min_scale * static_cast<float>(min_code + 1) > c.min();
    if (!tight_max || !tight_min || max_code < -127 || min_code < -127) {
      FAIL("codes " << max_code << ", " << min_code << " for [" << c.min() << ", " << c.max() << "]");
    }
  });
}

// The scorer that keeps the extreme keys in their own type.
inline const Scorer* full_bounds_of(ElementType type) {
  for (const Scorer& scorer : kScorers) {
    if (scorer.encoding == SummaryEncoding::kFull && scorer.full_type == type) return &scorer;
  }
  return nullptr;
}

inline void require_exact_bounds(const Summaries& summaries, const PagedProblem& problem) {
  for_each_channel(problem, [&](const Channel& c) {
    if (summaries.number(c.page_id, c.head, 0, c.d) != c.max() ||
        summaries.number(c.page_id, c.head, 1, c.d) != c.min()) {
      FAIL("page " << c.page_id << ", head " << c.head << ", channel " << c.d);
    }
  });
}

// Means and deviations lie within half a step, and the scale is no wider than needed.
inline void require_near_means(const Summaries& summaries, const PagedProblem& problem) {
  const Scorer& scorer = *summaries.scorer;
  for (int v = 0; v < scorer.num_vectors; ++v) {
    const PageStatistic statistic = scorer.vectors[v].statistic;
    if (statistic != PageStatistic::kMean && statistic != PageStatistic::kStd) continue;
    int widest = 0;
    for_each_channel(problem, [&](const Channel& c) {
      const double exact = statistic == PageStatistic::kMean ? c.mean() : c.deviation();
      const double step = summaries.scale(c.page_id, c.head, v);
      const double error = std::fabs(summaries.number(c.page_id, c.head, v, c.d) - exact);
      if (!(error <= 0.5 * step + 1e-6)) FAIL("error " << error << " at a step of " << step);
      widest = std::max(widest, std::abs(summaries.code(c.page_id, c.head, v, c.d)));
    });
    if (statistic == PageStatistic::kMean || problem.shape.page_size > 1) REQUIRE(widest == 127);
  }
}

// seal_by(problem, scorer) makes the summaries of all full pages.
template <typename Seal>
void require_bounds_past_nan_and_infinity(const Seal& seal_by) {
  for (const Scorer& scorer : kScorers) {
    if (!scorer.linear() || scorer.vectors[0].statistic != PageStatistic::kMax) continue;
    const bool quantised = scorer.encoding == SummaryEncoding::kInt8;
    const ElementType type = quantised ? ElementType::kBFloat16 : scorer.full_type;
    const Shape shape{.type = type, .page_size = 7, .head_dim = 8, .num_kv_heads = 1};
    PagedProblem problem(shape, {{7}}, {{0, 6}}, 5);
    const int32_t page_id = problem.page_tables[0][0];
    for (int64_t t = 0; t < 7; ++t) {
      for (int64_t d = 0; d < 8; ++d) problem.set_key(0, 0, t, d, static_cast<double>(t + 1));
      problem.set_key(0, 0, t, 1, kNan);
    }
    problem.set_key(0, 0, 6, 0, kNan);
    problem.set_key(0, 0, 0, 0, -kNan);
    CAPTURE(scorer.name);
    problem.set_key(0, 0, 3, 2, 4.0);
    problem.set_key(0, 0, 4, 3, 5.0);
    const Summaries finite = seal_by(problem, scorer);
    const float scale = quantised ? finite.scale(page_id, 0, 0) : 0.0F;
    REQUIRE(finite.number(page_id, 0, 0, 0) >= 6.0F);
    REQUIRE(finite.number(page_id, 0, 0, 0) <= 6.0F + scale);
    REQUIRE(finite.number(page_id, 0, 1, 0) <= 2.0F);
    REQUIRE(finite.number(page_id, 0, 1, 0) >= 2.0F - scale);
    REQUIRE(finite.number(page_id, 0, 0, 1) == 0.0F);
    REQUIRE(finite.number(page_id, 0, 1, 1) == 0.0F);

    problem.set_key(0, 0, 3, 2, kInfinity);
    problem.set_key(0, 0, 4, 3, -kInfinity);
    const Summaries clamped = seal_by(problem, scorer);
    const double largest = quantised ? kLargest : within(type, kInfinity);
    REQUIRE(clamped.number(page_id, 0, 0, 2) >= largest);
    REQUIRE(clamped.number(page_id, 0, 1, 3) <= -largest);
    if (!quantised) REQUIRE(std::isfinite(clamped.number(page_id, 0, 0, 2)));
  }
}

template <typename Seal>
void require_no_stray_bytes(const Seal& seal_by) {
  for (const Scorer& scorer : kScorers) {
    if (!scorer.linear()) continue;
    const bool quantised = scorer.encoding == SummaryEncoding::kInt8;
    Shape shape{.type = quantised ? ElementType::kFloat32 : scorer.full_type, .page_size = 7, .head_dim = 40};
    const PagedProblem problem = full_pages(shape, 6);
    const std::vector<int32_t> ids = full_page_ids(problem);
    CAPTURE(scorer.name);
    const Summaries summaries = seal_by(problem, scorer);
    const int64_t header = quantised ? 16 : 0;
    const int64_t used = header + scorer.num_vectors * shape.head_dim * scorer.code_bytes();
    for (int32_t page_id = 0; page_id < problem.num_pages; ++page_id) {
      const bool sealed = std::ranges::find(ids, page_id) != ids.end();
      for (int64_t i = 0; i < summaries.row_bytes(); ++i) {
        const uint8_t byte = summaries.row(page_id, 1)[i];
        const bool filler = i >= used || (quantised && i >= 4 * scorer.num_vectors && i < header);
        if (sealed && filler && byte != 0) FAIL("filler byte " << i << " is " << int{byte});
        if (!sealed && byte != kUntouched) FAIL("page " << page_id << " was not to be sealed");
      }
    }
  }
}

}  // namespace tinyserve::cpu::testing
