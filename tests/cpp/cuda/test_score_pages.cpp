// The CUDA kernels of score_pages, on the emulator, against the scorers' formula in double precision: the
// same problems as in the CPU's test. The summaries come from the CPU's seal_pages.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../cpu/score_oracle.h"
#include "../cpu/virtual_memory.h"
#include "cuda/score_pages.h"
#include "cuda_emulator/testing.h"
#include "device_batch.h"

using namespace tinyserve::cpu::testing;
using tinyserve::core::find_scorer;
using tinyserve::core::kScorers;
using tinyserve::core::ScorePagesBatchParams;
using tinyserve::cuda::emulator::same_under_every_schedule;
using tinyserve::cuda::testing::DeviceBatch;

namespace {

// Bits that no score has.
constexpr uint32_t kUnwritten = 0x7fabcdefU;

// Scores as bits.
using Scores = std::vector<uint32_t>;

std::vector<float> numbers(const Scores& scores) {
  std::vector<float> out(scores.size());
  std::memcpy(out.data(), scores.data(), scores.size() * sizeof(float));
  return out;
}

ScorePagesBatchParams params_of(const PagedProblem& problem, Summaries& summaries, GroupReduction reduction,
                                const DeviceBatch& batch) {
  return {.q = problem.q,
          .batch = batch.view(),
          .num_rows = batch.cu_query_lens.back(),
          .num_kv_heads = problem.shape.num_kv_heads,
          .group_size = problem.shape.group_size,
          .head_dim = problem.shape.head_dim,
          .page_size = problem.shape.page_size,
          .window = problem.shape.window,
          .page_summary = summaries.view(),
          .scorer = summaries.scorer,
          .group_reduction = reduction,
          .sm_scale = problem.shape.sm_scale(),
          .page_scores = nullptr,
          .head_scores = nullptr,
          .row_stride = batch.max_pages};
}

DeviceBatch batch_of(const PagedProblem& problem) {
  DeviceBatch batch(max_pages(problem));
  for (const RowAt& row : problem.row_places) batch.add(row.position, 1, problem.page_tables[row.sequence]);
  return batch;
}

Scores score(ScorePagesBatchParams params) {
  const int64_t num_row_heads = params.num_rows * params.num_kv_heads;
  Scores scores(static_cast<size_t>(num_row_heads * params.row_stride), kUnwritten);
  std::vector<float> head_scores(static_cast<size_t>(num_row_heads * params.group_size * params.row_stride),
                                 std::nanf(""));
  params.page_scores = reinterpret_cast<float*>(scores.data());
  if (params.group_reduction == GroupReduction::kSoftmax) params.head_scores = head_scores.data();
  REQUIRE(tinyserve::cuda::score_pages(params, nullptr) == cudaSuccess);
  return scores;
}

Scores score(const PagedProblem& problem, Summaries& summaries, GroupReduction reduction) {
  return score(params_of(problem, summaries, reduction, batch_of(problem)));
}

Scores score_under_every_schedule(const PagedProblem& problem, Summaries& summaries,
                                  GroupReduction reduction) {
  return same_under_every_schedule([&] { return score(problem, summaries, reduction); });
}

const tinyserve::cpu::KernelTable& cpu_kernels() { return *targets().front(); }

void require_every_reduction(const PagedProblem& problem, const Scorer& scorer) {
  Summaries summaries = seal(cpu_kernels(), problem, scorer);
  for (const GroupReduction reduction : kReductions) {
    if (!exists(scorer, reduction)) continue;
    CAPTURE(problem.shape, scorer.name, static_cast<int>(reduction));
    require_scores(numbers(score(problem, summaries, reduction)), problem, summaries, reduction);
  }
}

}  // namespace

TEST_CASE("Scores follow the scorer's formula, open pages score inf, pages out of sight -inf") {
  int turn = 0;
  for (const Shape& shape : covering_shapes(20)) {
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 1);
    ++turn;
    for (const Scorer& scorer : kScorers) {
      // Every shape meets a quarter of the ranks.
      if (!fits(scorer, shape)) continue;
      if (scorer.rank % 4 != (scorer.linear() ? 0 : turn % 4)) continue;
      require_every_reduction(problem, scorer);
    }
  }
}

TEST_CASE("Every group size and odd multiples of eight channels") {
  for (const int64_t group_size : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
    for (const int64_t head_dim : {24, 72, 120, 200, 248}) {
      const Shape shape{.type = group_size % 2 == 0 ? ElementType::kFloat16 : ElementType::kBFloat16,
                        .page_size = group_size % 3 == 0 ? 4 : 16,
                        .head_dim = head_dim,
                        .group_size = group_size};
      const PagedProblem problem(shape, {{5 * shape.page_size + 1}}, {{0, 5 * shape.page_size}}, 2);
      for (const Scorer& scorer : kScorers) {
        if (fits(scorer, shape) && (scorer.linear() || scorer.rank == 2)) {
          require_every_reduction(problem, scorer);
        }
      }
    }
  }
}

TEST_CASE("The order of threads and blocks does not change a bit of the scores") {
  // More pages than one tile holds.
  const Shape shape{.page_size = 2, .head_dim = 8, .group_size = 3};
  const PagedProblem problem(shape, {{401}, {129}, {60}}, {{0, 400}, {1, 128}, {2, 59}, {0, 131}, {2, -1}},
                             3);
  for (const Scorer& scorer : kScorers) {
    if (!fits(scorer, shape)) continue;
    Summaries summaries = seal(cpu_kernels(), problem, scorer);
    for (const GroupReduction reduction : kReductions) {
      if (!exists(scorer, reduction)) continue;
      CAPTURE(scorer.name, static_cast<int>(reduction));
      require_scores(numbers(score_under_every_schedule(problem, summaries, reduction)), problem, summaries,
                     reduction);
    }
  }
}

TEST_CASE("A row alone scores as in a batch, and a longer table changes nothing") {
  const Shape shape{.page_size = 4, .head_dim = 40, .group_size = 5};
  const std::vector<Sequence> sequences{{400}, {90}};
  const PagedProblem both(shape, sequences, {{0, 399}, {1, 77}}, 4);
  for (const Scorer& scorer : kScorers) {
    if (!fits(scorer, shape) || scorer.rank > 2) continue;
    Summaries summaries = seal(cpu_kernels(), both, scorer);
    for (const GroupReduction reduction : kReductions) {
      if (!exists(scorer, reduction)) continue;
      CAPTURE(scorer.name, static_cast<int>(reduction));
      const Scores together = score(both, summaries, reduction);
      DeviceBatch alone(20);
      alone.add(77, 1, {both.page_tables[1].begin(), both.page_tables[1].begin() + 20});
      ScorePagesBatchParams params = params_of(both, summaries, reduction, alone);
      params.q.data = static_cast<const float*>(params.q.data) + params.q.token_stride;
      const Scores single = score(params);
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        for (int64_t page = 0; page < 20; ++page) {
          REQUIRE(single[head * 20 + page] == together[(shape.num_kv_heads + head) * 100 + page]);
        }
      }
    }
  }
}

TEST_CASE("A NaN query gives NaN scores to its own group and to no other") {
  const Shape shape{.type = ElementType::kFloat16, .page_size = 16, .head_dim = 40, .group_size = 4};
  for (const int64_t bad_head : {4, 5, 7}) {
    PagedProblem problem(shape, {{64}}, {{0, 63}}, 4);
    problem.set_query(0, bad_head, 17, kNan);
    for (const Scorer& scorer : kScorers) {
      if (!fits(scorer, shape)) continue;
      Summaries summaries = seal(cpu_kernels(), problem, scorer);
      for (const GroupReduction reduction : kReductions) {
        if (!exists(scorer, reduction)) continue;
        CAPTURE(scorer.name, bad_head, static_cast<int>(reduction));
        const std::vector<float> scores = numbers(score(problem, summaries, reduction));
        for (int page = 0; page < 4; ++page) {
          REQUIRE(std::isfinite(scores[page]));
          REQUIRE(std::isnan(scores[4 + page]));
        }
      }
    }
  }
}

TEST_CASE("Summaries of pages that a row does not see are not read, nor is a page without an id") {
  const Shape shape{.page_size = 4, .head_dim = 16, .group_size = 2, .window = 30};
  // Windows hide all pages but the last eight; the table has no ids for those.
  const PagedProblem problem(shape, {{160}}, {{0, 158}, {0, 159}}, 5);
  REQUIRE(problem.page_tables[0][0] == -1);
  for (const Scorer& scorer : kScorers) {
    if (!fits(scorer, shape) || scorer.rank > 2) continue;
    Summaries summaries = seal(cpu_kernels(), problem, scorer);
    std::vector<bool> seen(problem.num_pages, false);
    for (const int32_t page_id : problem.page_tables[0]) {
      if (page_id >= 0) seen[page_id] = true;
    }
    const int64_t page_bytes = shape.num_kv_heads * summaries.row_bytes();
    for (int64_t page = 0; page < problem.num_pages; ++page) {
      if (!seen[page]) std::memset(summaries.bytes.data() + page * page_bytes, 0xff, page_bytes);
    }
    for (const GroupReduction reduction : kReductions) {
      if (!exists(scorer, reduction)) continue;
      CAPTURE(scorer.name, static_cast<int>(reduction));
      require_scores(numbers(score(problem, summaries, reduction)), problem, summaries, reduction);
      // A sealed page without an id scores -inf, and the others as if it were not there.
      DeviceBatch batch = batch_of(problem);
      batch.page_table[35] = -1;
      ScorePagesBatchParams params = params_of(problem, summaries, reduction, batch);
      params.num_rows = 1;
      const std::vector<float> scores = numbers(score(params));
      REQUIRE(scores[35] == -std::numeric_limits<float>::infinity());
      for (const int page : {34, 36}) REQUIRE(std::isfinite(scores[page]));
    }
  }
}

TEST_CASE("Sequences of several new tokens, of none, padding behind the last") {
  const Shape shape{.page_size = 4, .head_dim = 24, .group_size = 3};
  std::vector<RowAt> rows;
  for (const int32_t sequence : {0, 1}) {
    for (int64_t i = 0; i < 6; ++i) rows.push_back({sequence, 30 + i});
  }
  rows.push_back({0, -1});  // queries of padding
  rows.push_back({0, -1});
  const PagedProblem problem(shape, {{36}, {36}}, rows, 6);
  Summaries summaries = seal(cpu_kernels(), problem, *find_scorer("bounds"));
  DeviceBatch batch(max_pages(problem));
  batch.add(30, 6, problem.page_tables[0]);
  batch.add(30, 0, problem.page_tables[0]);
  batch.add(30, 6, problem.page_tables[1]);
  for (const GroupReduction reduction : kReductions) {
    ScorePagesBatchParams params = params_of(problem, summaries, reduction, batch);
    params.num_rows += 2;
    require_scores(numbers(score(params)), problem, summaries, reduction);
  }
}

TEST_CASE("Summaries beyond 2^31 bytes and scores beyond 2^31 elements are like any other") {
  constexpr int64_t kFar = (int64_t{1} << 31) + 64;
  const Shape shape{.page_size = 16, .head_dim = 64, .group_size = 3};
  const PagedProblem problem(shape, {{49}}, {{0, 48}, {0, 47}}, 7);
  Summaries summaries = seal(cpu_kernels(), problem, *find_scorer("bounds"));
  const VirtualMemory far_summaries(static_cast<size_t>(kFar * problem.num_pages));
  for (int64_t page = 0; page < problem.num_pages; ++page) {
    std::memcpy(static_cast<uint8_t*>(far_summaries.begin()) + page * kFar, summaries.row(page, 0),
                static_cast<size_t>(shape.num_kv_heads * summaries.row_bytes()));
  }
  const VirtualMemory far_scores(static_cast<size_t>(4 * kFar) * sizeof(float));
  const VirtualMemory far_head_scores(static_cast<size_t>(12 * kFar) * sizeof(float));
  const DeviceBatch batch = batch_of(problem);
  for (const GroupReduction reduction : kReductions) {
    const std::vector<float> expected = numbers(score(problem, summaries, reduction));
    ScorePagesBatchParams params = params_of(problem, summaries, reduction, batch);
    params.page_summary.data = static_cast<uint8_t*>(far_summaries.begin());
    params.page_summary.page_stride = kFar;
    params.page_scores = static_cast<float*>(far_scores.begin());
    params.head_scores = static_cast<float*>(far_head_scores.begin());
    params.row_stride = kFar;
    REQUIRE(tinyserve::cuda::score_pages(params, nullptr) == cudaSuccess);
    for (int64_t row_head = 0; row_head < 4; ++row_head) {
      for (int64_t page = 0; page < 4; ++page) {
        REQUIRE(params.page_scores[row_head * kFar + page] == expected[row_head * 4 + page]);
      }
    }
  }
}
