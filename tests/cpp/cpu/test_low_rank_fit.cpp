// Low-rank summaries: how well they restore the keys of a page, and what they do with keys that are no
// numbers.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>

#include "low_rank_cases.h"
#include "summaries.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::kScorers;
using tinyserve::core::Scorer;

namespace {

// check(seal_by) for every target.
template <typename Check>
void on_every_target(const Check& check) {
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    check([=](const PagedProblem& problem, const Scorer& scorer) { return seal(*kernels, problem, scorer); });
  }
}

}  // namespace

TEST_CASE("Keys that have no more directions than the summary are restored within the error of int4") {
  on_every_target([](const auto& seal_by) {
    for (const int64_t page_size : {16, 64}) {
      for (const int64_t head_dim : {24, 64, 128, 256}) {
        for (const int rank : {1, 2, 4, 8}) require_restored_keys(page_size, head_dim, rank, seal_by);
      }
    }
  });
}

TEST_CASE("A key far from the others is restored before the others") {
  on_every_target([](const auto& seal_by) { require_outlier_first(seal_by); });
}

TEST_CASE("Whatever the keys are, scales are finite, codes in range, and no byte is left over") {
  on_every_target([](const auto& seal_by) {
    for (const int64_t page_size : {9, 16, 17}) {
      for (const OddPage& page : odd_pages()) {
        for (const Scorer& scorer : kScorers) {
          if (!scorer.linear()) require_well_formed(page, page_size, scorer, seal_by);
        }
      }
    }
  });
}

TEST_CASE("Scaling the keys by a power of two scales the summary and changes no code") {
  on_every_target([](const auto& seal_by) { require_scaled_by_powers_of_two(seal_by); });
}

TEST_CASE("Layout and schedule do not change a bit of a low-rank summary") {
  for (Shape shape : covering_shapes(24)) {
    shape.window = -1;
    for (const Scorer& scorer : kScorers) {
      if (scorer.linear() || !fits(scorer, shape)) continue;
      const auto problem_of = [&](bool channel_major) {
        shape.channel_major = channel_major;
        return PagedProblem(shape, {{3 * shape.page_size}}, {{0, 3 * shape.page_size - 1}}, 8);
      };
      const PagedProblem token_major = problem_of(false);
      const PagedProblem channel_major = problem_of(true);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(shape, scorer.name, kernels->target);
        const Summaries serial = seal(*kernels, token_major, scorer);
        require_same_bits(seal(*kernels, channel_major, scorer).bytes, serial.bytes);
        for (const Schedule& schedule : kOtherSchedules) {
          require_same_bits(seal(*kernels, token_major, scorer, schedule).bytes, serial.bytes);
        }
      }
    }
  }
}
