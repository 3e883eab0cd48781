// The scorers' names and the byte layout of their summaries.
#include "core/scorer.h"

#include <catch2/catch_test_macros.hpp>

#include <set>
#include <string_view>

#include "core/limits.h"

using namespace tinyserve::core;

TEST_CASE("Scorers are found by their name, other names are not") {
  std::set<std::string_view> names;
  for (const Scorer& scorer : kScorers) {
    CAPTURE(scorer.name);
    REQUIRE(find_scorer(scorer.name) == &scorer);
    REQUIRE(names.insert(scorer.name).second);
  }
  for (const char* name : {"", "bound", "bounds_full", "BOUNDS", "bounds "}) {
    CAPTURE(name);
    REQUIRE(find_scorer(name) == nullptr);
  }
}

TEST_CASE("Group reductions are found by their name") {
  REQUIRE(find_group_reduction("mean") == GroupReduction::kMean);
  REQUIRE(find_group_reduction("max") == GroupReduction::kMax);
  REQUIRE_FALSE(find_group_reduction("sum").has_value());
  REQUIRE_FALSE(find_group_reduction("").has_value());
}

TEST_CASE("A summary row has room for the scales and the vectors, rounded up to 16 bytes") {
  for (const Scorer& scorer : kScorers) {
    for (int64_t head_dim = kMinHeadDim; head_dim <= kMaxHeadDim; head_dim += kHeadDimMultiple) {
      CAPTURE(scorer.name, head_dim);
      const int64_t code_bytes = scorer.quantised ? 1 : element_size(scorer.full_type);
      const int64_t used = (scorer.quantised ? 16 : 0) + scorer.num_vectors * head_dim * code_bytes;
      REQUIRE(scorer.summary_bytes(head_dim, 16) % 16 == 0);
      REQUIRE(scorer.summary_bytes(head_dim, 16) >= used);
      REQUIRE(scorer.summary_bytes(head_dim, 16) < used + 16);
    }
    REQUIRE(scorer.num_vectors * 4 <= kSummaryHeaderBytes);
    REQUIRE(scorer.num_vectors <= kMaxSummaryVectors);
  }
}

TEST_CASE("Summary sizes are those of the stored format") {
  // Stored summaries and other programs depend on these numbers.
  REQUIRE(find_scorer("bounds")->summary_bytes(64, 16) == 144);
  REQUIRE(find_scorer("bounds")->summary_bytes(40, 16) == 96);
  REQUIRE(find_scorer("bounds_full_fp32")->summary_bytes(64, 16) == 512);
  REQUIRE(find_scorer("bounds_full_fp16")->summary_bytes(64, 16) == 256);
  REQUIRE(find_scorer("bounds_full_bf16")->summary_bytes(8, 16) == 32);
  REQUIRE(find_scorer("mean")->summary_bytes(64, 16) == 80);
  REQUIRE(find_scorer("mean")->summary_bytes(8, 16) == 32);
  REQUIRE(find_scorer("mean_std")->summary_bytes(128, 16) == 272);
  REQUIRE(find_scorer("bounds_mean")->summary_bytes(128, 16) == 400);
}
