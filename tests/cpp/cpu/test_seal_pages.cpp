// seal_pages: what a summary promises about the keys of its page (low-rank summaries: test_low_rank_fit.cpp).
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "sealing_cases.h"
#include "summaries.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::find_scorer;
using tinyserve::core::kScorers;
using tinyserve::core::PageStatistic;
using tinyserve::core::Scorer;
using tinyserve::core::SummaryEncoding;

TEST_CASE("int8 bounds hold exactly in fp32 and are as tight as a code allows") {
  const Scorer& scorer = *find_scorer("bounds");
  for (const Shape& shape : sealing_shapes()) {
    PagedProblem problem = full_pages(shape, 1);
    for (const Keys& keys : distributions()) {
      CAPTURE(shape, keys.name);
      replace_keys(problem, keys, 2);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(kernels->target);
        const Summaries summaries = seal(*kernels, problem, scorer);
        require_tight_bounds(summaries, problem);
      }
    }
  }
}

TEST_CASE("Full-precision bounds are the extreme keys themselves") {
  for (const Shape& shape : sealing_shapes()) {
    if (shape.type == ElementType::kInt8) continue;  // has no full-precision summary
    const Scorer* scorer = full_bounds_of(shape.type);
    REQUIRE(scorer != nullptr);
    const PagedProblem problem = full_pages(shape, 3);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(shape, kernels->target);
      const Summaries summaries = seal(*kernels, problem, *scorer);
      require_exact_bounds(summaries, problem);
    }
  }
}

TEST_CASE("Means and deviations lie within half a step, and the scale is no wider than needed") {
  for (const Scorer& scorer : kScorers) {
    for (const Shape& shape : sealing_shapes()) {
      if (scorer.encoding != SummaryEncoding::kInt8) continue;
      const PagedProblem problem = full_pages(shape, 4);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(scorer.name, shape, kernels->target);
        const Summaries summaries = seal(*kernels, problem, scorer);
        require_near_means(summaries, problem);
      }
    }
  }
}

TEST_CASE("NaN keys leave the bounds of the others, infinite keys become the largest finite number") {
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    require_bounds_past_nan_and_infinity(
        [&](const PagedProblem& problem, const Scorer& scorer) { return seal(*kernels, problem, scorer); });
  }
}

TEST_CASE("The header, the rest of the last 16 bytes and other pages' rows hold no stray bytes") {
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    require_no_stray_bytes(
        [&](const PagedProblem& problem, const Scorer& scorer) { return seal(*kernels, problem, scorer); });
  }
}

TEST_CASE("Layout, schedule and CPU target do not change the bits of bounds") {
  for (Shape shape : sealing_shapes()) {
    for (const Scorer& scorer : kScorers) {
      if (!scorer.linear() || !fits(scorer, shape)) continue;
      shape.channel_major = false;
      const PagedProblem token_major = full_pages(shape, 7);
      shape.channel_major = true;
      const PagedProblem channel_major = full_pages(shape, 7);
      const Summaries first = seal(*targets().front(), token_major, scorer);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(shape, scorer.name, kernels->target);
        const Summaries serial = seal(*kernels, token_major, scorer);
        if (scorer.name != "mean_std") require_same_bits(serial.bytes, first.bytes);
        require_same_bits(seal(*kernels, channel_major, scorer).bytes, serial.bytes);
        for (const Schedule& schedule : kOtherSchedules) {
          require_same_bits(seal(*kernels, token_major, scorer, schedule).bytes, serial.bytes);
        }
      }
    }
  }
}
