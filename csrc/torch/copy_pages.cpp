// copy_pages, gather_pages, scatter_pages: whole pages move between pools and contiguous tensors; keys,
// values, scales and summaries together.

#include <algorithm>
#include <cstring>
#include <vector>

#include "torch/contents.h"
#include "torch/page_parts.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

template <int64_t kBytes>
void copy_elements(const core::PagePart& from, const char* source, const core::PagePart& to, char* target) {
  for (int64_t row = 0; row < from.rows; ++row) {
    for (int64_t column = 0; column < from.columns; ++column) {
      std::memcpy(target + row * to.row_stride + column * to.column_stride,
                  source + row * from.row_stride + column * from.column_stride, kBytes);
    }
  }
}

void copy_block(const core::MovePagesParams& move, int64_t page, int64_t head) {
  const auto& [from, from_ids, to, to_ids, num_pages] = move;
  const int64_t from_page = from_ids == nullptr ? page : from_ids[page];
  const int64_t to_page = to_ids == nullptr ? page : to_ids[page];
  const char* source = from.data + from_page * from.page_stride + head * from.head_stride;
  char* target = to.data + to_page * to.page_stride + head * to.head_stride;
  if (move.same_order()) {
    std::memcpy(target, source, static_cast<size_t>(from.rows * from.columns * from.element_size));
    return;
  }
  switch (from.element_size) {
    case 1:
      return copy_elements<1>(from, source, to, target);
    case 2:
      return copy_elements<2>(from, source, to, target);
    default:
      return copy_elements<4>(from, source, to, target);
  }
}

void run_moves(const std::vector<core::MovePagesParams>& moves) {
  for (const core::MovePagesParams& move : moves) {
    const int64_t num_heads = move.from.num_heads;
    torch::stable::parallel_for(0, move.num_pages * num_heads, /*grain=*/16, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) copy_block(move, item / num_heads, item % num_heads);
    });
  }
}

std::vector<int32_t> sorted(const int32_t* ids, int64_t count) {
  std::vector<int32_t> result(ids, ids + count);
  std::sort(result.begin(), result.end());
  return result;
}

// Two writes to one page would race.
void check_distinct(const int32_t* ids, int64_t count, const char* name) {
  const std::vector<int32_t> ascending = sorted(ids, count);
  const auto twice = std::adjacent_find(ascending.begin(), ascending.end());
  TINYSERVE_CHECK(twice == ascending.end(), name, ": expected no page twice, got ",
                  twice == ascending.end() ? 0 : *twice, " again");
}

void copy_pages(Tensor src_page_ids, Tensor dst_page_ids, Tensor k_pages, Tensor v_pages,
                std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                std::optional<Tensor> page_summary) {
  const PageParts pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  check_parts(pools);
  const int64_t num_pages = k_pages.size(0);
  const int32_t* from = check_page_ids(src_page_ids, "src_page_ids", num_pages);
  const int32_t* to = check_page_ids(dst_page_ids, "dst_page_ids", num_pages);
  const int64_t count = src_page_ids.size(0);
  check_size(dst_page_ids, "dst_page_ids", 0, count, "as src_page_ids");
  check_distinct(to, count, "dst_page_ids");
  const std::vector<int32_t> sources = sorted(from, count);
  for (int64_t i = 0; i < count; ++i) {
    TINYSERVE_CHECK(!std::binary_search(sources.begin(), sources.end(), to[i]),
                    "dst_page_ids: expected pages that are not sources, got ", to[i], " at index ", i);
  }
  run_moves(plan_copy(pools, from, to, count));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_pages(Tensor page_ids, Tensor k_pages,
                                                                Tensor v_pages,
                                                                std::optional<Tensor> k_scales,
                                                                std::optional<Tensor> v_scales,
                                                                std::optional<Tensor> page_summary) {
  const PageParts pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  check_parts(pools);
  const int32_t* ids = check_page_ids(page_ids, "page_ids", k_pages.size(0));
  const auto [gathered, moves] = plan_gather(pools, ids, page_ids.size(0));
  run_moves(moves);
  return {gathered[0], gathered[1], gathered[2], gathered[3], gathered[4]};
}

void scatter_pages(Tensor page_ids, Tensor k, Tensor v, std::optional<Tensor> k_scales_in,
                   std::optional<Tensor> v_scales_in, std::optional<Tensor> summary_in, Tensor k_pages,
                   Tensor v_pages, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                   std::optional<Tensor> page_summary) {
  check_dim(page_ids, "page_ids", 1, "[num_page_ids]");
  std::vector<core::MovePagesParams> moves =
      plan_scatter(parts_of(k, v, k_scales_in, v_scales_in, summary_in),
                   parts_of(k_pages, v_pages, k_scales, v_scales, page_summary), page_ids.size(0));
  const int32_t* ids = check_page_ids(page_ids, "page_ids", k_pages.size(0));
  check_distinct(ids, page_ids.size(0), "page_ids");
  for (core::MovePagesParams& move : moves) move.to_ids = ids;
  run_moves(moves);
}

}  // namespace

TINYSERVE_CPU_OPS(m) {
  m.impl("copy_pages", TORCH_BOX(&copy_pages));
  m.impl("gather_pages", TORCH_BOX(&gather_pages));
  m.impl("scatter_pages", TORCH_BOX(&scatter_pages));
}

}  // namespace tinyserve
