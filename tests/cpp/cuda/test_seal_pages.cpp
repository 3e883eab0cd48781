// The CUDA kernel of seal_pages, on the emulator, under the promises that the CPU's has to keep.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../cpu/low_rank_cases.h"
#include "../cpu/sealing_cases.h"
#include "cuda/seal_pages.h"
#include "cuda_emulator/testing.h"

using namespace tinyserve::cpu::testing;
using tinyserve::core::find_scorer;
using tinyserve::cuda::emulator::same_under_every_schedule;

namespace {

Summaries sealed_once(const PagedProblem& problem, const Scorer& scorer) {
  const std::vector<int32_t> ids = full_page_ids(problem);
  Summaries summaries(scorer, problem);
  REQUIRE(tinyserve::cuda::seal_pages({.page_ids = ids.data(),
                                       .num_kv_heads = problem.shape.num_kv_heads,
                                       .head_dim = problem.shape.head_dim,
                                       .page_size = problem.shape.page_size,
                                       .k_pages = problem.k_pages,
                                       .page_summary = summaries.view(),
                                       .scorer = &scorer},
                                      static_cast<int64_t>(ids.size()), nullptr) == cudaSuccess);
  return summaries;
}

Summaries sealed(const PagedProblem& problem, const Scorer& scorer) {
  Summaries summaries(scorer, problem);
  summaries.bytes = same_under_every_schedule([&] { return sealed_once(problem, scorer).bytes; });
  return summaries;
}

}  // namespace

TEST_CASE("int8 bounds hold exactly in fp32 and are as tight as a code allows") {
  for (const Shape& shape : sealing_shapes()) {
    PagedProblem problem = full_pages(shape, 1);
    for (const Keys& keys : distributions()) {
      CAPTURE(shape, keys.name);
      replace_keys(problem, keys, 2);
      require_tight_bounds(sealed(problem, *find_scorer("bounds")), problem);
    }
  }
}

TEST_CASE("Full-precision bounds are the extreme keys themselves") {
  for (const Shape& shape : sealing_shapes()) {
    if (shape.type == ElementType::kInt8) continue;  // has no full-precision summary
    CAPTURE(shape);
    const PagedProblem problem = full_pages(shape, 3);
    require_exact_bounds(sealed(problem, *full_bounds_of(shape.type)), problem);
  }
}

TEST_CASE("Means and deviations lie within half a step, and the scale is no wider than needed") {
  for (const Scorer& scorer : kScorers) {
    if (scorer.encoding != SummaryEncoding::kInt8) continue;
    for (const Shape& shape : sealing_shapes()) {
      CAPTURE(scorer.name, shape);
      const PagedProblem problem = full_pages(shape, 4);
      require_near_means(sealed(problem, scorer), problem);
    }
  }
}

TEST_CASE("NaN keys leave the bounds of the others, infinite keys become the largest finite number") {
  require_bounds_past_nan_and_infinity(&sealed);
}

TEST_CASE("The header, the rest of the last 16 bytes and other pages' rows hold no stray bytes") {
  require_no_stray_bytes(&sealed);
}

TEST_CASE("Both key layouts give the same bounds bit for bit") {
  for (Shape shape : sealing_shapes()) {
    CAPTURE(shape);
    shape.channel_major = false;
    const PagedProblem token_major = full_pages(shape, 7);
    shape.channel_major = true;
    const PagedProblem channel_major = full_pages(shape, 7);
    const Scorer& scorer = *find_scorer("bounds");
    require_same_bits(sealed(channel_major, scorer).bytes, sealed(token_major, scorer).bytes);
  }
}

TEST_CASE("A low-rank summary restores the keys that have no more directions, in CUDA as well") {
  for (const int64_t head_dim : {24, 64, 128, 256}) {
    for (const int rank : {1, 4, 8}) require_restored_keys(16, head_dim, rank, &sealed);
  }
  require_restored_keys(64, 256, 2, &sealed);  // a page of 64 KiB, one warp to a block
  require_outlier_first(&sealed);
  require_scaled_by_powers_of_two(&sealed);
}

TEST_CASE("Whatever the keys are, CUDA makes scales finite, codes in range, and leaves no byte over") {
  for (const int64_t page_size : {9, 16, 17}) {
    for (const OddPage& page : odd_pages()) {
      for (const char* name : {"low_rank_1", "low_rank_max_3", "low_rank_8"}) {
        require_well_formed(page, page_size, *find_scorer(name), &sealed);
      }
    }
  }
}

// Sums in another order may tip a code, and with it what the next rank is fitted to: then the sketch is
// another one, as good.
TEST_CASE("CUDA and CPU fit the same low-rank summaries but for the rounding of a few pages") {
  int num_pages = 0;
  int num_other = 0;
  for (Shape shape : sealing_shapes()) {
    if (shape.page_size < 4) continue;
    shape.num_kv_heads = 1;
    for (const char* name : {"low_rank_2", "low_rank_4"}) {
      const Scorer& scorer = *find_scorer(name);
      if (!fits(scorer, shape)) continue;
      CAPTURE(shape, scorer.name);
      const PagedProblem problem = full_pages(shape, 9);
      const Summaries actual = sealed_once(problem, scorer);
      const Summaries expected = seal(*targets().front(), problem, scorer);
      for (int64_t page = 0; page < 3; ++page) {
        const int32_t page_id = problem.page_tables[0][page];
        ++num_pages;
        if (std::equal(actual.row(page_id, 0), actual.row(page_id, 0) + actual.row_bytes(),
                       expected.row(page_id, 0))) {
          continue;
        }
        ++num_other;
        Page keys(static_cast<size_t>(shape.page_size));
        for (int64_t t = 0; t < shape.page_size; ++t) {
          const float* key = problem.key(0, 0, page * shape.page_size + t);
          keys[t].assign(key, key + shape.head_dim);
        }
        const double error = restoring_error(actual, page_id, keys);
        REQUIRE(error < restoring_error(expected, page_id, keys) + 0.01);
      }
    }
  }
  CAPTURE(num_pages, num_other);
  REQUIRE(num_other * 10 <= num_pages);
}

TEST_CASE("Neither the layout of keys nor the order of threads changes a bit of a low-rank summary in CUDA") {
  for (Shape shape : covering_shapes(16)) {
    if (shape.page_size < 4) continue;
    shape.window = -1;
    CAPTURE(shape);
    shape.channel_major = false;
    const PagedProblem token_major = full_pages(shape, 10);
    shape.channel_major = true;
    const PagedProblem channel_major = full_pages(shape, 10);
    const Scorer& scorer = *find_scorer("low_rank_3");
    require_same_bits(sealed_once(channel_major, scorer).bytes, sealed(token_major, scorer).bytes);
  }
}
