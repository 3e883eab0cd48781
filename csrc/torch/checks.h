// Argument checks of the operators: every message names the argument, what was expected and what came, and
// begins with "tinyserve: " so that the Python wrappers can turn it into ValueError (or TypeError, for a
// message that says "expected dtype"). All checks of an op run before it writes anything.
//
// These are what can be known without reading a tensor's data: shapes, strides, dtypes, the device. Ops on
// the CPU look at the contents of lengths, tables and lists as well (contents.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "core/element_type.h"
#include "core/page_pool_view.h"
#include "core/params.h"
#include "core/scorer.h"

#define TINYSERVE_CHECK(condition, ...) STD_TORCH_CHECK(condition, "tinyserve: ", __VA_ARGS__)

namespace tinyserve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string shape_text(const Tensor& tensor);
void check_same_shape(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name);

// That a tensor lies on the device of the op's implementation. Every library file has its own: on_cpu.cpp,
// cuda/device.cpp.
void check_device(const Tensor& tensor, const char* name);
void check_dim(const Tensor& tensor, const char* name, int64_t dim, const char* shape);
void check_size(const Tensor& tensor, const char* name, int64_t axis, int64_t expected, const char* meaning);

// An int32 tensor whose last stride is 1.
const int32_t* check_int32(const Tensor& tensor, const char* name, int64_t dim, const char* shape);

// fp32, fp16 or bf16; refuses everything else by name.
core::ElementType check_element_type(const Tensor& tensor, const char* name);

// Packed queries, keys or values [num_tokens, heads, head_dim]. `keep` holds a contiguous copy where the
// last stride is not 1, and must outlive the view.
core::PackedView check_packed(const Tensor& tensor, const char* name, Tensor& keep);

// A page pool of fp32, fp16, bf16, or int8 with its scales; sizes of k_pages are checked against the limits,
// those of v_pages against k_pages.
struct KvPools {
  core::PagePoolView k;
  core::PagePoolView v;
  int64_t num_pages;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t head_dim;
};
KvPools check_pools(const Tensor& k_pages, const Tensor& v_pages, const std::optional<Tensor>& k_scales,
                    const std::optional<Tensor>& v_scales);
core::PagePoolView check_k_pages(const Tensor& k_pages, const std::optional<Tensor>& k_scales);

void check_page_size(int64_t page_size);
void check_head_dim(int64_t head_dim);
int64_t check_group_size(int64_t num_heads, int64_t num_kv_heads);

const core::Scorer* check_scorer(const std::string& name);
// Also refuses a full-precision scorer of another element type than the keys': its bounds would not be
// bounds. int8 keys have no full-precision variant: `bounds` is as wide as the keys are.
const core::Scorer* check_scorer_for(const std::string& name, core::ElementType k_type);
core::PageSummaryView check_summary(const Tensor& page_summary, const core::Scorer& scorer, int64_t num_pages,
                                    int64_t num_kv_heads, int64_t head_dim, int64_t page_size);

// The sequences of a packed batch. `page_table` may be absent (select_pages needs none); then `max_pages`
// bounds the visible pages.
core::BatchView check_batch_view(const Tensor& cu_query_lens, const Tensor& seq_lens,
                                 const Tensor* page_table, int64_t max_pages);

void check_window(int64_t window);
void check_softcap(double softcap);
void check_forced_pages(int64_t num_sink_pages, int64_t num_recent_pages);

// `page_budget` int32 [batch].
const int32_t* check_page_budget(const Tensor& page_budget, int64_t batch_size, int64_t max_page_budget,
                                 int64_t num_sink_pages, int64_t num_recent_pages);

// A new tensor on the device of `beside`.
Tensor empty_beside(const Tensor& beside, std::initializer_list<int64_t> shape, ScalarType type);

}  // namespace tinyserve
