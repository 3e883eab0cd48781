#include "torch/checks.h"

#include "core/limits.h"
#include "torch/element_type.h"

namespace tinyserve {
namespace {

std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return "scalar type " + std::to_string(static_cast<int>(type));
  }
}

core::PagePoolView view_pool(const Tensor& pages, core::ElementType type) {
  return {.data = pages.data_ptr(),
          .type = type,
          .num_pages = pages.size(0),
          .page_stride = pages.stride(0),
          .head_stride = pages.stride(1),
          .token_stride = pages.stride(2),
          .channel_stride = pages.stride(3)};
}

core::ElementType check_page_type(const Tensor& pages, const char* name) {
  check_device(pages, name);
  if (pages.scalar_type() == ScalarType::Char) return core::ElementType::kInt8;
  const std::optional<core::ElementType> type = element_type_of(pages.scalar_type());
  TINYSERVE_CHECK(type.has_value(), name, ": expected dtype float32, float16, bfloat16 or int8, got ",
                  dtype_name(pages.scalar_type()));
  return *type;
}

// Adds the scales to the view of a checked pool: there exactly where the pages are int8.
void add_scales(const std::optional<Tensor>& scales, const char* name, const Tensor& pages,
                core::PagePoolView& pool) {
  if (pool.type != core::ElementType::kInt8) {
    TINYSERVE_CHECK(!scales.has_value(), name, ": expected None (the pages are ",
                    dtype_name(pages.scalar_type()), ", only int8 pages have scales), got a tensor");
    return;
  }
  TINYSERVE_CHECK(scales.has_value(), name, ": expected a tensor of scales beside int8 pages, got None");
  check_device(*scales, name);
  TINYSERVE_CHECK(scales->scalar_type() == ScalarType::Float, name, ": expected dtype float32, got ",
                  dtype_name(scales->scalar_type()));
  check_dim(*scales, name, 3, "[num_pages, num_kv_heads, page_size]");
  check_size(*scales, name, 0, pages.size(0), "num_pages of the pages");
  check_size(*scales, name, 1, pages.size(1), "num_kv_heads of the pages");
  check_size(*scales, name, 2, pages.size(2), "page_size of the pages");
  TINYSERVE_CHECK(scales->stride(2) == 1 || scales->size(2) == 1, name, ": expected a last stride of 1, got ",
                  scales->stride(2));
  pool.scales = static_cast<float*>(scales->data_ptr());
  pool.scale_page_stride = scales->stride(0);
  pool.scale_head_stride = scales->stride(1);
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(tensor.size(axis));
  }
  return text + "]";
}

void check_same_shape(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name) {
  bool same = tensor.dim() == other.dim();
  for (int64_t axis = 0; same && axis < tensor.dim(); ++axis) same = tensor.size(axis) == other.size(axis);
  TINYSERVE_CHECK(same, name, ": expected the shape of ", other_name, ", ", shape_text(other), ", got ",
                  shape_text(tensor));
}

void check_dim(const Tensor& tensor, const char* name, int64_t dim, const char* shape) {
  TINYSERVE_CHECK(tensor.dim() == dim, name, ": expected shape ", shape, ", got ", shape_text(tensor));
}

void check_size(const Tensor& tensor, const char* name, int64_t axis, int64_t expected, const char* meaning) {
  TINYSERVE_CHECK(tensor.size(axis) == expected, name, ": expected size ", expected, " (", meaning,
                  ") at axis ", axis, ", got shape ", shape_text(tensor));
}

const int32_t* check_int32(const Tensor& tensor, const char* name, int64_t dim, const char* shape) {
  check_device(tensor, name);
  TINYSERVE_CHECK(tensor.scalar_type() == ScalarType::Int, name, ": expected dtype int32, got ",
                  dtype_name(tensor.scalar_type()));
  check_dim(tensor, name, dim, shape);
  TINYSERVE_CHECK(tensor.size(dim - 1) <= 1 || tensor.stride(dim - 1) == 1, name,
                  ": expected a last stride of 1, got ", tensor.stride(dim - 1));
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

core::ElementType check_element_type(const Tensor& tensor, const char* name) {
  check_device(tensor, name);
  const std::optional<core::ElementType> type = element_type_of(tensor.scalar_type());
  TINYSERVE_CHECK(type.has_value(), name, ": expected dtype float32, float16 or bfloat16, got ",
                  dtype_name(tensor.scalar_type()));
  return *type;
}

core::PackedView check_packed(const Tensor& tensor, const char* name, Tensor& keep) {
  const core::ElementType type = check_element_type(tensor, name);
  check_dim(tensor, name, 3, "[num_tokens, num_heads, head_dim]");
  keep = tensor.stride(2) == 1 ? tensor : torch::stable::contiguous(tensor);
  return {.data = keep.const_data_ptr(),
          .type = type,
          .token_stride = keep.stride(0),
          .head_stride = keep.stride(1)};
}

void check_page_size(int64_t page_size) {
  TINYSERVE_CHECK(page_size >= 1 && page_size <= core::kMaxPageSize, "page_size: expected 1 to ",
                  core::kMaxPageSize, ", got ", page_size);
}

void check_head_dim(int64_t head_dim) {
  TINYSERVE_CHECK(head_dim >= core::kMinHeadDim && head_dim <= core::kMaxHeadDim &&
                      head_dim % core::kHeadDimMultiple == 0,
                  "head_dim: expected a multiple of ", core::kHeadDimMultiple, " from ", core::kMinHeadDim,
                  " to ", core::kMaxHeadDim, ", got ", head_dim);
}

int64_t check_group_size(int64_t num_heads, int64_t num_kv_heads) {
  TINYSERVE_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && num_heads > 0,
                  "q: expected a number of query heads that is a multiple of the ", num_kv_heads,
                  " kv heads, got ", num_heads);
  return num_heads / num_kv_heads;
}

core::PagePoolView check_k_pages(const Tensor& k_pages, const std::optional<Tensor>& k_scales) {
  const core::ElementType type = check_page_type(k_pages, "k_pages");
  check_dim(k_pages, "k_pages", 4, "[num_pages, num_kv_heads, page_size, head_dim]");
  check_page_size(k_pages.size(2));
  check_head_dim(k_pages.size(3));
  TINYSERVE_CHECK(
      k_pages.stride(3) == 1 || k_pages.stride(2) == 1 || k_pages.size(2) == 1,
      "k_pages: expected stride 1 over head_dim (token-major) or over page_size (channel-major), got ",
      k_pages.stride(3), " and ", k_pages.stride(2));
  core::PagePoolView pool = view_pool(k_pages, type);
  add_scales(k_scales, "k_scales", k_pages, pool);
  return pool;
}

KvPools check_pools(const Tensor& k_pages, const Tensor& v_pages, const std::optional<Tensor>& k_scales,
                    const std::optional<Tensor>& v_scales) {
  KvPools pools{.k = check_k_pages(k_pages, k_scales),
                .v = {},
                .num_pages = k_pages.size(0),
                .num_kv_heads = k_pages.size(1),
                .page_size = k_pages.size(2),
                .head_dim = k_pages.size(3)};
  const core::ElementType v_type = check_page_type(v_pages, "v_pages");
  TINYSERVE_CHECK(v_type == pools.k.type, "v_pages: expected dtype of k_pages, ",
                  dtype_name(k_pages.scalar_type()), ", got ", dtype_name(v_pages.scalar_type()));
  check_same_shape(v_pages, "v_pages", k_pages, "k_pages");
  TINYSERVE_CHECK(v_pages.stride(3) == 1, "v_pages: expected stride 1 over head_dim (token-major), got ",
                  v_pages.stride(3));
  pools.v = view_pool(v_pages, v_type);
  add_scales(v_scales, "v_scales", v_pages, pools.v);
  return pools;
}

const core::Scorer* check_scorer(const std::string& name) {
  const core::Scorer* scorer = core::find_scorer(name);
  if (scorer == nullptr) {
    std::string names;
    for (const core::Scorer& known : core::kScorers)
      names += (names.empty() ? "" : ", ") + std::string(known.name);
    TINYSERVE_CHECK(false, "scorer: expected one of ", names, ", got '", name, "'");
  }
  return scorer;
}

const core::Scorer* check_scorer_for(const std::string& name, core::ElementType k_type) {
  const core::Scorer* scorer = check_scorer(name);
  TINYSERVE_CHECK(scorer->encoding != core::SummaryEncoding::kFull || k_type != core::ElementType::kInt8,
                  "scorer: expected bounds or another scorer with int8 summaries for int8 pages, got '", name,
                  "'");
  TINYSERVE_CHECK(
      scorer->encoding != core::SummaryEncoding::kFull || scorer->full_type == k_type,
      "scorer: expected the variant for the dtype of k_pages (bounds_full_fp32, _fp16 or _bf16), got '", name,
      "'");
  return scorer;
}

core::PageSummaryView check_summary(const Tensor& page_summary, const core::Scorer& scorer, int64_t num_pages,
                                    int64_t num_kv_heads, int64_t head_dim, int64_t page_size) {
  check_device(page_summary, "page_summary");
  TINYSERVE_CHECK(page_summary.scalar_type() == ScalarType::Byte, "page_summary: expected dtype uint8, got ",
                  dtype_name(page_summary.scalar_type()));
  check_dim(page_summary, "page_summary", 3, "[num_pages, num_kv_heads, summary_bytes]");
  if (num_pages >= 0) check_size(page_summary, "page_summary", 0, num_pages, "num_pages");
  if (num_kv_heads >= 0) check_size(page_summary, "page_summary", 1, num_kv_heads, "num_kv_heads");
  TINYSERVE_CHECK(scorer.rank < page_size,
                  "scorer: expected a rank of at most page_size - 1 = ", page_size - 1, ", got '",
                  std::string(scorer.name), "' of rank ", scorer.rank);
  check_size(page_summary, "page_summary", 2, scorer.summary_bytes(head_dim, page_size),
             "summary_bytes of the scorer");
  TINYSERVE_CHECK(page_summary.stride(2) == 1, "page_summary: expected a last stride of 1, got ",
                  page_summary.stride(2));
  return {.data = static_cast<uint8_t*>(page_summary.data_ptr()),
          .page_stride = page_summary.stride(0),
          .head_stride = page_summary.stride(1)};
}

core::BatchView check_batch_view(const Tensor& cu_query_lens, const Tensor& seq_lens,
                                 const Tensor* page_table, int64_t max_pages) {
  core::BatchView batch{.cu_query_lens = nullptr,
                        .seq_lens = check_int32(seq_lens, "seq_lens", 1, "[batch]"),
                        .page_table = nullptr,
                        .page_table_stride = 0,
                        .batch_size = seq_lens.size(0),
                        .max_pages = max_pages};
  batch.cu_query_lens = check_int32(cu_query_lens, "cu_query_lens", 1, "[batch + 1]");
  check_size(cu_query_lens, "cu_query_lens", 0, batch.batch_size + 1, "batch + 1");
  if (page_table != nullptr) {
    batch.page_table = check_int32(*page_table, "page_table", 2, "[batch, max_pages]");
    check_size(*page_table, "page_table", 0, batch.batch_size, "batch");
    batch.max_pages = page_table->size(1);
    batch.page_table_stride = page_table->stride(0);
  }
  return batch;
}

void check_window(int64_t window) {
  TINYSERVE_CHECK(window == -1 || window >= 1, "window: expected -1 (none) or at least 1, got ", window);
}

void check_softcap(double softcap) {
  TINYSERVE_CHECK(softcap == 0.0, "softcap: expected 0 (soft-capping is not implemented), got ", softcap);
}

void check_forced_pages(int64_t num_sink_pages, int64_t num_recent_pages) {
  TINYSERVE_CHECK(num_sink_pages >= 0, "num_sink_pages: expected at least 0, got ", num_sink_pages);
  TINYSERVE_CHECK(num_recent_pages >= 1,
                  "num_recent_pages: expected at least 1 (the last page is always attended), got ",
                  num_recent_pages);
}

const int32_t* check_page_budget(const Tensor& page_budget, int64_t batch_size, int64_t max_page_budget,
                                 int64_t num_sink_pages, int64_t num_recent_pages) {
  check_forced_pages(num_sink_pages, num_recent_pages);
  const int32_t* budgets = check_int32(page_budget, "page_budget", 1, "[batch]");
  check_size(page_budget, "page_budget", 0, batch_size, "batch");
  TINYSERVE_CHECK(max_page_budget >= num_sink_pages + num_recent_pages,
                  "max_page_budget: expected at least the ", num_sink_pages + num_recent_pages,
                  " forced pages (num_sink_pages + num_recent_pages), got ", max_page_budget);
  return budgets;
}

Tensor empty_beside(const Tensor& beside, std::initializer_list<int64_t> shape, ScalarType type) {
  return torch::stable::empty({shape.begin(), shape.size()}, type, std::nullopt, beside.device());
}

}  // namespace tinyserve
