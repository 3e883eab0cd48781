// append_kv against plain stores to the places the layout gives, with the reference conversions; into int8
// pages against the definition of the scale and the codes.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "append_problem.h"
#include "summaries.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::AppendKvParams;
using tinyserve::core::kScorers;
using tinyserve::core::PackedView;
using tinyserve::core::PageWrite;
using tinyserve::core::Scorer;
using tinyserve::core::SummaryEncoding;

namespace {

AppendKvParams append_params(EmptyPools& pools, const Appending& appending,
                             const std::vector<PageWrite>& writes) {
  return {.k = appending.packed(1),
          .v = appending.packed(2),
          .writes = writes.data(),
          .num_kv_heads = appending.shape.num_kv_heads,
          .head_dim = appending.shape.head_dim,
          .page_size = appending.shape.page_size,
          .k_pages = pools.problem.k_pages,
          .v_pages = pools.problem.v_pages,
          .page_summary = {},
          .scorer = nullptr};
}

}  // namespace

TEST_CASE("Appended tokens land in their slots, converted, and nothing else changes") {
  for (const Shape& shape : covering_shapes()) {
    for (const ElementType source_type : kElementTypes) {
      CAPTURE(shape, static_cast<int>(source_type));
      const Appending appending(shape, source_type, 3);
      EmptyPools reference(shape);
      const ExpectedPool expected_k = expected_pool(appending, reference, 1);
      const ExpectedPool expected_v = expected_pool(appending, reference, 2);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(kernels->target);
        EmptyPools pools(shape);
        run(kernels->append_kv, append_params(pools, appending, appending.writes),
            static_cast<int64_t>(appending.writes.size()) * shape.num_kv_heads);
        require_same_bits(pool_bytes(pools.problem.k_pages), without_gap(expected_k.pages));
        require_same_bits(pool_bytes(pools.problem.v_pages), without_gap(expected_v.pages));
        require_same_bits(pools.problem.k_scales(), expected_k.scales);
        require_same_bits(pools.problem.v_scales(), expected_v.scales);
      }
    }
  }
}

TEST_CASE("Appending in any schedule, whole or token by token, leaves the same bytes and summaries") {
  for (const Shape& shape : covering_shapes(32)) {
    const Appending appending(shape, shape.query_type(), 4);
    const std::vector<PageWrite> singles = appending.single_token_writes();
    const Scorer& scorer = kScorers[0];
    for (const KernelTable* kernels : targets()) {
      CAPTURE(shape, kernels->target);
      EmptyPools whole(shape);
      Summaries whole_summaries(scorer, whole.problem);
      AppendKvParams params = append_params(whole, appending, appending.writes);
      params.scorer = &scorer;
      params.page_summary = whole_summaries.view();
      run(kernels->append_kv, params, static_cast<int64_t>(appending.writes.size()) * shape.num_kv_heads);
      const auto require_same = [&](EmptyPools& pools, const Summaries& summaries) {
        require_same_bits(pool_bytes(pools.problem.k_pages), pool_bytes(whole.problem.k_pages));
        require_same_bits(pool_bytes(pools.problem.v_pages), pool_bytes(whole.problem.v_pages));
        require_same_bits(pools.problem.k_scales(), whole.problem.k_scales());
        require_same_bits(pools.problem.v_scales(), whole.problem.v_scales());
        require_same_bits(summaries.bytes, whole_summaries.bytes);
      };
      for (const Schedule& schedule : kOtherSchedules) {
        CAPTURE(schedule);
        EmptyPools pools(shape);
        Summaries summaries(scorer, pools.problem);
        AppendKvParams other = append_params(pools, appending, appending.writes);
        other.scorer = &scorer;
        other.page_summary = summaries.view();
        run(kernels->append_kv, other, static_cast<int64_t>(appending.writes.size()) * shape.num_kv_heads,
            schedule);
        require_same(pools, summaries);
      }
      EmptyPools pools(shape);
      Summaries summaries(scorer, pools.problem);
      AppendKvParams stepwise = append_params(pools, appending, singles);
      stepwise.scorer = &scorer;
      stepwise.page_summary = summaries.view();
      run(kernels->append_kv, stepwise, static_cast<int64_t>(singles.size()) * shape.num_kv_heads);
      require_same(pools, summaries);
    }
  }
}

TEST_CASE("A page is summarised when its last slot is written, as seal_pages would") {
  for (const Scorer& scorer : kScorers) {
    const Shape shape{
        .type = scorer.encoding == SummaryEncoding::kFull ? scorer.full_type : ElementType::kFloat16,
        .page_size = 7,
        .head_dim = 40};
    if (!fits(scorer, shape)) continue;
    for (const KernelTable* kernels : targets()) {
      CAPTURE(scorer.name, kernels->target);
      PagedProblem problem(shape, {{20}}, {{0, 19}}, 5);
      const Summaries sealed = seal(*kernels, problem, scorer);
      // Written once more from the tokens: pages 0 and 1 fill, page 2 does not.
      Elements packed(shape.type, 20 * shape.num_kv_heads * shape.head_dim);
      for (int64_t i = 0; i < packed.size(); ++i) {
        const int64_t head = i / shape.head_dim % shape.num_kv_heads;
        packed.set(i, problem.key(0, head, i / (shape.num_kv_heads * shape.head_dim))[i % shape.head_dim]);
      }
      const PackedView view{.data = packed.data(),
                            .type = shape.type,
                            .token_stride = shape.num_kv_heads * shape.head_dim,
                            .head_stride = shape.head_dim};
      std::vector<PageWrite> writes;
      for (int32_t page = 0; page < 3; ++page) {
        writes.push_back({problem.page_tables[0][page], 7 * page, page < 2 ? 7 : 6, 0});
      }
      Summaries appended(scorer, problem);
      const AppendKvParams params{.k = view,
                                  .v = view,
                                  .writes = writes.data(),
                                  .num_kv_heads = shape.num_kv_heads,
                                  .head_dim = shape.head_dim,
                                  .page_size = shape.page_size,
                                  .k_pages = problem.k_pages,
                                  .v_pages = problem.v_pages,
                                  .page_summary = appended.view(),
                                  .scorer = &scorer};
      run(kernels->append_kv, params, 3 * shape.num_kv_heads);
      require_same_bits(appended.bytes, sealed.bytes);
      REQUIRE(*appended.row(problem.page_tables[0][2], 0) == kUntouched);
    }
  }
}
