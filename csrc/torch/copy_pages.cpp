// copy_pages, gather_pages, scatter_pages: whole pages move between pools and contiguous tensors; keys,
// values, scales and summaries together. They move bits, so every element type and layout is accepted.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "torch/checks.h"

namespace tinyserve {
namespace {

// One pool as blocks [page, head] of `rows` x `columns` elements; strides and sizes in bytes.
struct Part {
  char* data;
  int64_t num_heads;
  int64_t page_stride;
  int64_t head_stride;
  int64_t rows;
  int64_t row_stride;
  int64_t columns;
  int64_t column_stride;
  int64_t element_size;
};

int64_t element_bytes(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Byte:
    case ScalarType::Char:
      return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Float:
      return 4;
    default:
      TINYSERVE_CHECK(false, name, ": expected dtype float32, float16, bfloat16, int8 or uint8, got another");
  }
  return 0;
}

// k_pages and v_pages are 4D; scales and summaries 3D, taken as a single column or a single row.
Part view_part(const Tensor& pool, const char* name, int64_t dim, bool single_row = false) {
  check_cpu(pool, name);
  check_dim(pool, name, dim,
            dim == 4 ? "[num_pages, num_kv_heads, page_size, head_dim]" : "[num_pages, num_kv_heads, size]");
  const int64_t bytes = element_bytes(pool, name);
  Part part{.data = static_cast<char*>(pool.data_ptr()),
            .num_heads = pool.size(1),
            .page_stride = pool.stride(0) * bytes,
            .head_stride = pool.stride(1) * bytes,
            .rows = single_row ? 1 : pool.size(2),
            .row_stride = single_row ? 0 : pool.stride(2) * bytes,
            .columns = 1,
            .column_stride = bytes,
            .element_size = bytes};
  if (dim == 4) {
    part.columns = pool.size(3);
    part.column_stride = pool.stride(3) * bytes;
  } else if (single_row) {
    part.columns = pool.size(2);
    part.column_stride = pool.stride(2) * bytes;
  }
  return part;
}

template <int64_t kBytes>
void copy_elements(const Part& from, const char* source, const Part& to, char* target) {
  for (int64_t row = 0; row < from.rows; ++row) {
    for (int64_t column = 0; column < from.columns; ++column) {
      std::memcpy(target + row * to.row_stride + column * to.column_stride,
                  source + row * from.row_stride + column * from.column_stride, kBytes);
    }
  }
}

void copy_block(const Part& from, int64_t from_page, const Part& to, int64_t to_page, int64_t head) {
  const char* source = from.data + from_page * from.page_stride + head * from.head_stride;
  char* target = to.data + to_page * to.page_stride + head * to.head_stride;
  const bool same_strides = from.row_stride == to.row_stride && from.column_stride == to.column_stride;
  const bool token_major =
      from.column_stride == from.element_size && from.row_stride == from.columns * from.element_size;
  const bool channel_major =
      from.row_stride == from.element_size && from.column_stride == from.rows * from.element_size;
  const bool one_row = from.rows == 1 && from.column_stride == from.element_size;
  if (same_strides && (token_major || channel_major || one_row)) {
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

// Page i of the job is `from_ids[i]` of `from` and `to_ids[i]` of `to`; a null list means page i itself.
void move_pages(const Part& from, const int32_t* from_ids, const Part& to, const int32_t* to_ids,
                int64_t num_pages) {
  torch::stable::parallel_for(0, num_pages * from.num_heads, /*grain=*/16, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t page = item / from.num_heads;
      copy_block(from, from_ids == nullptr ? page : from_ids[page], to,
                 to_ids == nullptr ? page : to_ids[page], item % from.num_heads);
    }
  });
}

constexpr const char* kNames[] = {"k_pages", "v_pages", "k_scales", "v_scales", "page_summary"};

// Null where the part is absent.
std::array<const Tensor*, 5> parts_of(const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scales,
                                      const std::optional<Tensor>& v_scales,
                                      const std::optional<Tensor>& page_summary) {
  const auto optional = [](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? &*tensor : nullptr;
  };
  return {&k, &v, optional(k_scales), optional(v_scales), optional(page_summary)};
}

Part view_part(const Tensor& pool, size_t index, const char* name) {
  return view_part(pool, name, index < 2 ? 4 : 3, /*single_row=*/index == 4);
}

void check_same_pages(const std::array<const Tensor*, 5>& pools) {
  for (size_t i = 1; i < pools.size(); ++i) {
    if (pools[i] == nullptr) continue;
    check_size(*pools[i], kNames[i], 0, pools[0]->size(0), "num_pages of k_pages");
    check_size(*pools[i], kNames[i], 1, pools[0]->size(1), "num_kv_heads of k_pages");
  }
}

Tensor gather_part(const Tensor& pool, size_t index, const int32_t* ids, int64_t count) {
  Tensor gathered = index < 2
                        ? empty_cpu({count, pool.size(1), pool.size(2), pool.size(3)}, pool.scalar_type())
                        : empty_cpu({count, pool.size(1), pool.size(2)}, pool.scalar_type());
  move_pages(view_part(pool, index, kNames[index]), ids, view_part(gathered, index, kNames[index]), nullptr,
             count);
  return gathered;
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
  const auto pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i] != nullptr) view_part(*pools[i], i, kNames[i]);
  }
  check_same_pages(pools);
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
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i] == nullptr) continue;
    const Part part = view_part(*pools[i], i, kNames[i]);
    move_pages(part, from, part, to, count);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_pages(Tensor page_ids, Tensor k_pages,
                                                                Tensor v_pages,
                                                                std::optional<Tensor> k_scales,
                                                                std::optional<Tensor> v_scales,
                                                                std::optional<Tensor> page_summary) {
  const auto pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i] != nullptr) view_part(*pools[i], i, kNames[i]);
  }
  check_same_pages(pools);
  const int32_t* ids = check_page_ids(page_ids, "page_ids", k_pages.size(0));
  std::array<Tensor, 5> gathered;
  for (size_t i = 0; i < pools.size(); ++i) {
    gathered[i] = pools[i] != nullptr ? gather_part(*pools[i], i, ids, page_ids.size(0))
                                      : empty_cpu({0}, i == 4 ? ScalarType::Byte : ScalarType::Float);
  }
  return {gathered[0], gathered[1], gathered[2], gathered[3], gathered[4]};
}

void scatter_pages(Tensor page_ids, Tensor k, Tensor v, std::optional<Tensor> k_scales_in,
                   std::optional<Tensor> v_scales_in, std::optional<Tensor> summary_in, Tensor k_pages,
                   Tensor v_pages, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                   std::optional<Tensor> page_summary) {
  constexpr const char* kSourceNames[] = {"k", "v", "k_scales_in", "v_scales_in", "summary_in"};
  const auto sources = parts_of(k, v, k_scales_in, v_scales_in, summary_in);
  const auto pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  check_dim(page_ids, "page_ids", 1, "[num_page_ids]");
  const int64_t count = page_ids.size(0);
  std::vector<std::pair<Part, Part>> moves;
  for (size_t i = 0; i < pools.size(); ++i) {
    TINYSERVE_CHECK((sources[i] == nullptr) == (pools[i] == nullptr), kSourceNames[i],
                    ": expected a tensor exactly where ", kNames[i], " is one, got one of the two");
    if (pools[i] == nullptr) continue;
    const Part to = view_part(*pools[i], i, kNames[i]);
    const Part from = view_part(*sources[i], i, kSourceNames[i]);
    TINYSERVE_CHECK(sources[i]->scalar_type() == pools[i]->scalar_type(), kSourceNames[i],
                    ": expected dtype of ", kNames[i], ", got another");
    check_size(*sources[i], kSourceNames[i], 0, count, "number of page_ids");
    for (int64_t axis = 1; axis < sources[i]->dim(); ++axis) {
      check_size(*sources[i], kSourceNames[i], axis, pools[i]->size(axis), "as the pool");
    }
    moves.emplace_back(from, to);
  }
  check_same_pages(pools);
  const int32_t* ids = check_page_ids(page_ids, "page_ids", k_pages.size(0));
  check_distinct(ids, count, "page_ids");
  for (const auto& [from, to] : moves) move_pages(from, nullptr, to, ids, count);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tinyserve, CPU, m) {
  m.impl("copy_pages", TORCH_BOX(&copy_pages));
  m.impl("gather_pages", TORCH_BOX(&gather_pages));
  m.impl("scatter_pages", TORCH_BOX(&scatter_pages));
}

}  // namespace tinyserve
