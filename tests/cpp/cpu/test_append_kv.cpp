// append_kv against plain stores to the places the layout gives, with the reference conversions; into int8
// pages against the definition of the scale and the codes.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

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

// New tokens for four pages of an empty pool: a whole page, a part from the first slot on, the last slot, a
// part in the middle.
struct Appending {
  Appending(const Shape& wanted, ElementType source_type, uint32_t seed) : shape(wanted), random(seed) {
    const int64_t page_size = shape.page_size;
    std::vector<int32_t> ids{0, 1, 2, 3, 4, 5};
    std::ranges::shuffle(ids, random);
    add(ids[0], page_size, 0);
    add(ids[1], std::max<int64_t>(1, page_size / 2), 0);
    add(ids[2], 1, page_size - 1);
    add(ids[3], std::max<int64_t>(1, page_size / 3), page_size / 3);
    token_stride = 3 * shape.num_kv_heads * shape.head_dim;
    source = Elements(source_type, num_tokens * token_stride);
    std::normal_distribution<double> normal(0.0, 100.0);
    // By token: numbers of one size, numbers of all sizes, infinities and NaN among them (poison in int8).
    constexpr double kSpecial[] = {0.0, -0.0, 7e4, -1e-7, 1e-40, 65519.9, 3e38, kInfinity, -kInfinity, kNan};
    for (int64_t i = 0; i < source.size(); ++i) {
      const int64_t token = i / token_stride;
      const size_t num_special = token % 3 == 0 ? 2 : (token % 3 == 1 ? 6 : std::size(kSpecial));
      const bool is_zero = token % 7 == 6;
      source.set(i, random() % 8 == 0 ? kSpecial[random() % num_special] : (is_zero ? -0.0 : normal(random)));
    }
  }

  void add(int64_t page_id, int64_t count, int64_t slot) {
    writes.push_back({.page_id = page_id,
                      .first_token = static_cast<int32_t>(num_tokens),
                      .num_tokens = static_cast<int32_t>(count),
                      .first_slot = static_cast<int32_t>(slot)});
    num_tokens += count;
  }

  int64_t head_offset(int part, int64_t token, int64_t head) const {
    return token * token_stride + (part * shape.num_kv_heads + head) * shape.head_dim;
  }
  PackedView packed(int part) const {
    return {.data = source.data() + head_offset(part, 0, 0) * tinyserve::core::element_size(source.type()),
            .type = source.type(),
            .token_stride = token_stride,
            .head_stride = shape.head_dim};
  }
  std::vector<PageWrite> single_token_writes() const {
    std::vector<PageWrite> singles;
    for (const PageWrite& write : writes) {
      for (int32_t i = 0; i < write.num_tokens; ++i) {
        singles.push_back({write.page_id, write.first_token + i, 1, write.first_slot + i});
      }
    }
    return singles;
  }

  Shape shape;
  std::mt19937 random;
  std::vector<PageWrite> writes;
  int64_t num_tokens = 0;
  int64_t token_stride = 0;
  Elements source;  // fused q, k, v; the parts 1 and 2 are appended
};

// Pools of six pages that hold nothing yet.
struct EmptyPools {
  explicit EmptyPools(const Shape& shape)
      : problem(shape, {{4 * shape.page_size, 4 * shape.page_size}}, {{0, 4 * shape.page_size - 1}}, 1) {}

  AppendKvParams params(const Appending& appending, const std::vector<PageWrite>& writes) {
    return {.k = appending.packed(1),
            .v = appending.packed(2),
            .writes = writes.data(),
            .num_kv_heads = appending.shape.num_kv_heads,
            .head_dim = appending.shape.head_dim,
            .page_size = appending.shape.page_size,
            .k_pages = problem.k_pages,
            .v_pages = problem.v_pages,
            .page_summary = {},
            .scorer = nullptr};
  }

  PagedProblem problem;
};

// Codes of a row of int8 pages, and its scale.
float expected_row(const std::vector<double>& row, std::vector<double>& codes) {
  codes.assign(row.size(), 0.0);
  float amax = 0.0F;
  for (const double x : row) {
    if (!std::isfinite(x)) return std::numeric_limits<float>::quiet_NaN();
    amax = std::max(amax, std::fabs(static_cast<float>(x)));
  }
  const float scale = amax / 127.0F;
  for (size_t d = 0; d < row.size() && scale > 0.0F; ++d) {
    codes[d] = std::clamp(std::nearbyint(static_cast<float>(row[d]) / scale), -127.0F, 127.0F);
  }
  return scale;
}

// What the pool should hold, and its scales where it is int8.
struct ExpectedPool {
  Elements pages;
  std::vector<float> scales;
};

ExpectedPool expected_int8_pool(const Appending& appending, EmptyPools& pools, int part) {
  const auto& view = part == 1 ? pools.problem.k_pages : pools.problem.v_pages;
  ExpectedPool expected{Elements(ElementType::kInt8, view.num_pages * view.page_stride),
                        part == 1 ? pools.problem.k_scales() : pools.problem.v_scales()};
  for (const PageWrite& write : appending.writes) {
    for (int64_t i = 0; i < write.num_tokens; ++i) {
      for (int64_t head = 0; head < appending.shape.num_kv_heads; ++head) {
        std::vector<double> row(static_cast<size_t>(appending.shape.head_dim));
        for (size_t d = 0; d < row.size(); ++d) {
          row[d] = appending.source.get(appending.head_offset(part, write.first_token + i, head) +
                                        static_cast<int64_t>(d));
        }
        std::vector<double> codes;
        const int64_t slot = write.first_slot + i;
        const int64_t place = write.page_id * view.scale_page_stride + head * view.scale_head_stride + slot;
        expected.scales[place] = expected_row(row, codes);
        for (size_t d = 0; d < row.size(); ++d) {
          const auto channel = static_cast<int64_t>(d);
          expected.pages.set(pools.problem.offset(view, write.page_id, head, slot, channel), codes[d]);
        }
      }
    }
  }
  return expected;
}

ExpectedPool expected_pool(const Appending& appending, EmptyPools& pools, int part) {
  if (appending.shape.type == ElementType::kInt8) return expected_int8_pool(appending, pools, part);
  const auto& view = part == 1 ? pools.problem.k_pages : pools.problem.v_pages;
  Elements expected(appending.shape.type, view.num_pages * view.page_stride);
  for (const PageWrite& write : appending.writes) {
    for (int64_t i = 0; i < write.num_tokens; ++i) {
      for (int64_t head = 0; head < appending.shape.num_kv_heads; ++head) {
        for (int64_t d = 0; d < appending.shape.head_dim; ++d) {
          expected.set(pools.problem.offset(view, write.page_id, head, write.first_slot + i, d),
                       appending.source.get(appending.head_offset(part, write.first_token + i, head) + d));
        }
      }
    }
  }
  return {expected, {}};
}

// The pool's pages, up to the end of the last one.
std::vector<uint8_t> pool_bytes(const tinyserve::core::PagePoolView& view) {
  const auto* begin = static_cast<const uint8_t*>(view.data);
  return {begin, begin + (view.num_pages * view.page_stride - 8) * tinyserve::core::element_size(view.type)};
}

std::vector<uint8_t> without_gap(const Elements& pool) {
  const auto gap = static_cast<size_t>(8 * tinyserve::core::element_size(pool.type()));
  return {pool.bytes().begin(), pool.bytes().end() - static_cast<int64_t>(gap)};
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
        run(kernels->append_kv, pools.params(appending, appending.writes),
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
      AppendKvParams params = whole.params(appending, appending.writes);
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
        AppendKvParams other = pools.params(appending, appending.writes);
        other.scorer = &scorer;
        other.page_summary = summaries.view();
        run(kernels->append_kv, other, static_cast<int64_t>(appending.writes.size()) * shape.num_kv_heads,
            schedule);
        require_same(pools, summaries);
      }
      EmptyPools pools(shape);
      Summaries summaries(scorer, pools.problem);
      AppendKvParams stepwise = pools.params(appending, singles);
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
