// The scorers' names and the byte layout of their summaries.
#include "core/scorer.h"

#include <catch2/catch_test_macros.hpp>

#include <set>
#include <string>
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
  for (const char* name :
       {"", "bound", "bounds_full", "BOUNDS", "bounds ", "low_rank", "low_rank_0", "low_rank_9"}) {
    CAPTURE(name);
    REQUIRE(find_scorer(name) == nullptr);
  }
}

TEST_CASE("Group reductions are found by their name") {
  REQUIRE(find_group_reduction("mean") == GroupReduction::kMean);
  REQUIRE(find_group_reduction("max") == GroupReduction::kMax);
  REQUIRE(find_group_reduction("softmax") == GroupReduction::kSoftmax);
  REQUIRE_FALSE(find_group_reduction("sum").has_value());
  REQUIRE_FALSE(find_group_reduction("").has_value());
}

TEST_CASE("A summary row has room for what its encoding keeps, rounded up to 16 bytes") {
  for (const Scorer& scorer : kScorers) {
    for (int64_t head_dim = kMinHeadDim; head_dim <= kMaxHeadDim; head_dim += kHeadDimMultiple) {
      for (int64_t page_size = scorer.rank + 1; page_size <= kMaxPageSize; ++page_size) {
        CAPTURE(scorer.name, head_dim, page_size);
        int64_t used = 0;
        switch (scorer.encoding) {
          case SummaryEncoding::kInt8:
            used = 16 + scorer.num_vectors * head_dim;
            break;
          case SummaryEncoding::kFull:
            used = scorer.num_vectors * head_dim * element_size(scorer.full_type);
            break;
          case SummaryEncoding::kLowRank:
            used = head_dim + scorer.rank * ((head_dim + 15) / 16 * 8 + (page_size + 15) / 16 * 8) +
                   2 * (1 + scorer.rank);
            break;
        }
        REQUIRE(scorer.summary_bytes(head_dim, page_size) == (used + 15) / 16 * 16);
      }
    }
    REQUIRE(scorer.num_vectors * 4 <= kSummaryHeaderBytes);
    REQUIRE(scorer.num_vectors <= kMaxSummaryVectors);
    REQUIRE(scorer.rank <= kMaxRank);
    REQUIRE(scorer.linear() == (scorer.num_vectors > 0));
    REQUIRE(scorer.linear() == (scorer.rank == 0));
  }
}

TEST_CASE("Every rank has a scorer for either token reduction, named by both") {
  for (int rank = 1; rank <= kMaxRank; ++rank) {
    const Scorer* sum = find_scorer("low_rank_" + std::to_string(rank));
    const Scorer* max = find_scorer("low_rank_max_" + std::to_string(rank));
    REQUIRE(sum != nullptr);
    REQUIRE(max != nullptr);
    REQUIRE(sum->rank == rank);
    REQUIRE(max->rank == rank);
    REQUIRE(sum->token_reduction == TokenReduction::kLogSumExp);
    REQUIRE(max->token_reduction == TokenReduction::kMax);
  }
}

TEST_CASE("The parts of a low-rank summary lie one after the other") {
  const LowRankLayout layout = find_scorer("low_rank_3")->low_rank_layout(40, 17);
  REQUIRE(layout.basis == 40);
  REQUIRE(layout.basis_bytes == 24);
  REQUIRE(layout.coefficients == 40 + 3 * 24);
  REQUIRE(layout.coefficient_bytes == 16);
  REQUIRE(layout.scales == 40 + 3 * 24 + 3 * 16);
  REQUIRE(layout.end == 40 + 3 * 24 + 3 * 16 + 8);
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
  REQUIRE(find_scorer("low_rank_1")->summary_bytes(64, 16) == 112);
  REQUIRE(find_scorer("low_rank_2")->summary_bytes(64, 16) == 160);
  REQUIRE(find_scorer("low_rank_2")->summary_bytes(128, 16) == 288);
  REQUIRE(find_scorer("low_rank_max_4")->summary_bytes(40, 33) == 256);
}
