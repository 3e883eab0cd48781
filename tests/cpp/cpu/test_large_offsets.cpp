// Every kernel on pages that lie more than 2^31 elements into a pool of virtual memory, of which only those
// pages are ever touched. The bits must be those of the same pages in a small pool.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_oracle.h"
#include "summaries.h"
#include "virtual_memory.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::PagePoolView;

namespace {

constexpr int64_t kFarPage = (int64_t{1} << 31) / 1024 + 5;  // pages of more than 1024 elements
constexpr Shape kShape{.type = ElementType::kFloat16, .page_size = 16, .head_dim = 64, .group_size = 3};

// The same pool with every page id moved up by kFarPage.
void move_pool(PagePoolView& pool, const VirtualMemory& memory) {
  const int64_t element_size = tinyserve::core::element_size(pool.type);
  const int64_t page_bytes = pool.page_stride * element_size;
  std::memcpy(static_cast<uint8_t*>(memory.begin()) + kFarPage * page_bytes, pool.data,
              static_cast<size_t>(pool.num_pages * page_bytes - 8 * element_size));
  pool.data = memory.begin();
  pool.num_pages += kFarPage;
}

// Scales as far apart as the pages they belong to.
void move_scales(PagePoolView& pool, int64_t num_pages, const VirtualMemory& memory) {
  auto* moved = static_cast<float*>(memory.begin());
  for (int64_t page = 0; page < num_pages; ++page) {
    std::memcpy(moved + (kFarPage + page) * pool.page_stride, pool.scales + page * pool.scale_page_stride,
                sizeof(float) * static_cast<size_t>(pool.scale_page_stride));
  }
  pool.scales = moved;
  pool.scale_page_stride = pool.page_stride;
}

size_t pool_bytes(const PagePoolView& pool, int64_t element_size) {
  return static_cast<size_t>((kFarPage + pool.num_pages) * pool.page_stride * element_size);
}

struct Case {
  ElementType type;
  bool channel_major;
};

constexpr Case kCases[] = {{ElementType::kFloat16, false},
                           {ElementType::kFloat16, true},
                           {ElementType::kInt8, false},
                           {ElementType::kInt8, true}};

}  // namespace

TEST_CASE("Pages beyond 2^31 elements are read, written and summarised like any other") {
  for (const auto& [type, channel_major] : kCases) {
    Shape shape = kShape;
    shape.type = type;
    shape.channel_major = channel_major;
    const int64_t element_size = tinyserve::core::element_size(type);
    const std::vector<Sequence> batch{{40}};
    const PagedProblem near_problem(shape, batch, {{0, 39}}, 1);
    PagedProblem far_problem(shape, batch, {{0, 39}}, 1);
    REQUIRE(kFarPage * near_problem.k_pages.page_stride > int64_t{1} << 31);
    const VirtualMemory keys(pool_bytes(near_problem.k_pages, element_size));
    const VirtualMemory values(pool_bytes(near_problem.v_pages, element_size));
    const VirtualMemory key_scales(pool_bytes(near_problem.k_pages, sizeof(float)));
    const VirtualMemory value_scales(pool_bytes(near_problem.v_pages, sizeof(float)));
    if (type == ElementType::kInt8) {
      move_scales(far_problem.k_pages, near_problem.num_pages, key_scales);
      move_scales(far_problem.v_pages, near_problem.num_pages, value_scales);
    }
    move_pool(far_problem.k_pages, keys);
    move_pool(far_problem.v_pages, values);
    for (int32_t& page_id : far_problem.page_tables[0]) page_id += kFarPage;

    for (const KernelTable* kernels : targets()) {
      CAPTURE(static_cast<int>(type), channel_major, kernels->target);
      require_same_attention(attend(*kernels, far_problem), attend(*kernels, near_problem));

      // append_kv: one token behind the last one.
      const int64_t last_page = far_problem.page_tables[0][2];
      Elements token(shape.query_type(), shape.num_kv_heads * shape.head_dim);
      // Small integers, 127 among those of each head: codes of scale 1 in int8.
      for (int64_t i = 0; i < token.size(); ++i) token.set(i, i % 64 == 63 ? 127.0 : i % 64);
      const tinyserve::core::PackedView packed{token.data(), token.type(), token.size(), shape.head_dim};
      const tinyserve::core::PageWrite write{last_page, 0, 1, 8};
      const tinyserve::core::AppendKvParams append{.k = packed,
                                                   .v = packed,
                                                   .writes = &write,
                                                   .num_kv_heads = shape.num_kv_heads,
                                                   .head_dim = shape.head_dim,
                                                   .page_size = shape.page_size,
                                                   .k_pages = far_problem.k_pages,
                                                   .v_pages = far_problem.v_pages,
                                                   .page_summary = {},
                                                   .scorer = nullptr};
      run(kernels->append_kv, append, shape.num_kv_heads);
      for (int64_t i = 0; i < token.size(); ++i) {
        const int64_t offset =
            far_problem.offset(far_problem.k_pages, last_page, i / shape.head_dim, 8, i % shape.head_dim);
        Elements stored(type, 1);
        std::memcpy(stored.data(), static_cast<const uint8_t*>(keys.begin()) + element_size * offset,
                    static_cast<size_t>(element_size));
        REQUIRE(stored.get(0) == token.get(i));
        if (type == ElementType::kInt8) {
          REQUIRE(far_problem.k_pages.token_scales(last_page, i / shape.head_dim)[8] == 1.0F);
        }
      }
    }
  }
}

TEST_CASE("Summaries beyond 2^31 bytes are written and scored like any other") {
  const PagedProblem problem(kShape, {{33}}, {{0, 32}}, 2);
  const auto& scorer = *tinyserve::core::find_scorer("bounds");
  constexpr int64_t kPageStride = int64_t{1} << 31;
  const VirtualMemory memory(static_cast<size_t>(kPageStride * problem.num_pages));
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    const Summaries near_summaries = seal(*kernels, problem, scorer);
    const std::vector<int32_t> ids = full_page_ids(problem);
    const tinyserve::core::PageSummaryView far_view{static_cast<uint8_t*>(memory.begin()), kPageStride,
                                                    near_summaries.row_bytes()};
    const tinyserve::core::SealPagesParams sealing{.page_ids = ids.data(),
                                                   .num_kv_heads = kShape.num_kv_heads,
                                                   .head_dim = kShape.head_dim,
                                                   .page_size = kShape.page_size,
                                                   .k_pages = problem.k_pages,
                                                   .page_summary = far_view,
                                                   .scorer = &scorer};
    run(kernels->seal_pages, sealing, static_cast<int64_t>(ids.size()) * kShape.num_kv_heads);
    std::vector<float> near_scores(6, 0.0F);
    std::vector<float> far_scores(6, 0.0F);
    Summaries near_copy = near_summaries;
    tinyserve::core::ScorePagesParams scoring{.q = problem.q,
                                              .rows = problem.rows.data(),
                                              .num_kv_heads = kShape.num_kv_heads,
                                              .group_size = kShape.group_size,
                                              .head_dim = kShape.head_dim,
                                              .page_size = kShape.page_size,
                                              .max_chunks = 1,
                                              .page_summary = near_copy.view(),
                                              .scorer = &scorer,
                                              .group_reduction = tinyserve::core::GroupReduction::kMean,
                                              .sm_scale = kShape.sm_scale(),
                                              .page_scores = near_scores.data(),
                                              .row_stride = 3};
    run(kernels->score_pages, scoring, kShape.num_kv_heads);
    scoring.page_summary = far_view;
    scoring.page_scores = far_scores.data();
    run(kernels->score_pages, scoring, kShape.num_kv_heads);
    require_same_bits(far_scores, near_scores);
    for (const int32_t page_id : ids) {
      const uint8_t* far_row = static_cast<const uint8_t*>(memory.begin()) + page_id * kPageStride;
      REQUIRE(std::memcmp(far_row, near_summaries.row(page_id, 0), near_summaries.row_bytes()) == 0);
    }
  }
}
