#include "torch/page_parts.h"

namespace tinyserve {
namespace {

constexpr const char* kNames[] = {"k_pages", "v_pages", "k_scales", "v_scales", "page_summary"};
constexpr const char* kSourceNames[] = {"k", "v", "k_scales_in", "v_scales_in", "summary_in"};

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
core::PagePart view_part(const Tensor& pool, const char* name, int64_t dim, bool single_row = false) {
  check_device(pool, name);
  check_dim(pool, name, dim,
            dim == 4 ? "[num_pages, num_kv_heads, page_size, head_dim]" : "[num_pages, num_kv_heads, size]");
  const int64_t bytes = element_bytes(pool, name);
  core::PagePart part{.data = static_cast<char*>(pool.data_ptr()),
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

core::PagePart view_part(const Tensor& pool, size_t index, const char* name) {
  return view_part(pool, name, index < 2 ? 4 : 3, /*single_row=*/index == 4);
}

void check_same_pages(const PageParts& pools) {
  for (size_t i = 1; i < pools.size(); ++i) {
    if (pools[i] == nullptr) continue;
    check_size(*pools[i], kNames[i], 0, pools[0]->size(0), "num_pages of k_pages");
    check_size(*pools[i], kNames[i], 1, pools[0]->size(1), "num_kv_heads of k_pages");
  }
}

Tensor empty_part(const Tensor& pool, size_t index, int64_t count) {
  if (index < 2) {
    return empty_beside(pool, {count, pool.size(1), pool.size(2), pool.size(3)}, pool.scalar_type());
  }
  return empty_beside(pool, {count, pool.size(1), pool.size(2)}, pool.scalar_type());
}

}  // namespace

PageParts parts_of(const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scales,
                   const std::optional<Tensor>& v_scales, const std::optional<Tensor>& page_summary) {
  const auto optional = [](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? &*tensor : nullptr;
  };
  return {&k, &v, optional(k_scales), optional(v_scales), optional(page_summary)};
}

void check_parts(const PageParts& pools) {
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i] != nullptr) view_part(*pools[i], i, kNames[i]);
  }
  check_same_pages(pools);
}

std::vector<core::MovePagesParams> plan_copy(const PageParts& pools, const int32_t* from_ids,
                                             const int32_t* to_ids, int64_t count) {
  std::vector<core::MovePagesParams> moves;
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i] == nullptr) continue;
    const core::PagePart part = view_part(*pools[i], i, kNames[i]);
    moves.push_back({.from = part, .from_ids = from_ids, .to = part, .to_ids = to_ids, .num_pages = count});
  }
  return moves;
}

Gathering plan_gather(const PageParts& pools, const int32_t* ids, int64_t count) {
  Gathering gathering;
  for (size_t i = 0; i < pools.size(); ++i) {
    Tensor& gathered = gathering.gathered[i];
    if (pools[i] == nullptr) {
      gathered = empty_beside(*pools[0], {0}, i == 4 ? ScalarType::Byte : ScalarType::Float);
      continue;
    }
    gathered = empty_part(*pools[i], i, count);
    gathering.moves.push_back({.from = view_part(*pools[i], i, kNames[i]),
                               .from_ids = ids,
                               .to = view_part(gathered, i, kNames[i]),
                               .to_ids = nullptr,
                               .num_pages = count});
  }
  return gathering;
}

std::vector<core::MovePagesParams> plan_scatter(const PageParts& sources, const PageParts& pools,
                                                int64_t count) {
  std::vector<core::MovePagesParams> moves;
  for (size_t i = 0; i < pools.size(); ++i) {
    TINYSERVE_CHECK((sources[i] == nullptr) == (pools[i] == nullptr), kSourceNames[i],
                    ": expected a tensor exactly where ", kNames[i], " is one, got one of the two");
    if (pools[i] == nullptr) continue;
    const core::PagePart to = view_part(*pools[i], i, kNames[i]);
    const core::PagePart from = view_part(*sources[i], i, kSourceNames[i]);
    TINYSERVE_CHECK(sources[i]->scalar_type() == pools[i]->scalar_type(), kSourceNames[i],
                    ": expected dtype of ", kNames[i], ", got another");
    check_size(*sources[i], kSourceNames[i], 0, count, "number of page_ids");
    for (int64_t axis = 1; axis < sources[i]->dim(); ++axis) {
      check_size(*sources[i], kSourceNames[i], axis, pools[i]->size(axis), "as the pool");
    }
    moves.push_back({.from = from, .from_ids = nullptr, .to = to, .to_ids = nullptr, .num_pages = count});
  }
  check_same_pages(pools);
  return moves;
}

}  // namespace tinyserve
