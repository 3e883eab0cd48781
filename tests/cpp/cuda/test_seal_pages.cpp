// The CUDA kernel of seal_pages, on the emulator, under the promises that the CPU's has to keep.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <vector>

#include "../cpu/sealing_cases.h"
#include "cuda/seal_pages.h"
#include "cuda_emulator/testing.h"

using namespace tinyserve::cpu::testing;
using tinyserve::core::find_scorer;
using tinyserve::cuda::emulator::same_under_every_schedule;

namespace {

Summaries sealed(const PagedProblem& problem, const Scorer& scorer) {
  const std::vector<int32_t> ids = full_page_ids(problem);
  Summaries summaries(scorer, problem);
  summaries.bytes = same_under_every_schedule([&] {
    Summaries fresh(scorer, problem);
    REQUIRE(tinyserve::cuda::seal_pages({.page_ids = ids.data(),
                                         .num_kv_heads = problem.shape.num_kv_heads,
                                         .head_dim = problem.shape.head_dim,
                                         .page_size = problem.shape.page_size,
                                         .k_pages = problem.k_pages,
                                         .page_summary = fresh.view(),
                                         .scorer = &scorer},
                                        static_cast<int64_t>(ids.size()), nullptr) == cudaSuccess);
    return fresh.bytes;
  });
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

TEST_CASE("A low-rank scorer is refused") {
  const PagedProblem problem = full_pages(Shape{}, 8);
  const tinyserve::core::SealPagesParams params{.page_ids = nullptr,
                                                .num_kv_heads = problem.shape.num_kv_heads,
                                                .head_dim = problem.shape.head_dim,
                                                .page_size = problem.shape.page_size,
                                                .k_pages = problem.k_pages,
                                                .page_summary = {},
                                                .scorer = find_scorer("low_rank_2")};
  REQUIRE(tinyserve::cuda::seal_pages(params, 1, nullptr) == cudaErrorNotSupported);
}
