#include "torch/decode_stages.h"

#include <algorithm>

#include "core/limits.h"
#include "core/scratch.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

// Partial results of one block of rows stay below this, however many rows an op is given.
constexpr int64_t kMaxPartialFloats = 4 << 20;

// Pages that make it worth waking another thread: a few microseconds of work.
constexpr int64_t kScoredPagesPerThread = 256;
constexpr int64_t kAttendedPagesPerThread = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Work items a thread takes at least, when each covers up to `pages_per_item` pages.
constexpr int64_t grain_of(int64_t pages_per_thread, int64_t pages_per_item) {
  return std::max<int64_t>(1, pages_per_thread / std::max<int64_t>(1, pages_per_item));
}

}  // namespace

core::ScorePagesParams check_score_pages(const Tensor& q, Tensor& keep_q, int64_t num_kv_heads,
                                         int64_t page_size, const core::Scorer* scorer,
                                         const std::string& group_reduction, double sm_scale,
                                         const Tensor& page_summary, int64_t num_pages) {
  const std::optional<core::GroupReduction> reduction = core::find_group_reduction(group_reduction);
  TINYSERVE_CHECK(reduction.has_value(), "group_reduction: expected 'mean' or 'max', got '", group_reduction,
                  "'");
  const core::PackedView view = check_packed(q, "q", keep_q);
  check_head_dim(q.size(2));
  return {.q = view,
          .rows = nullptr,
          .num_kv_heads = num_kv_heads,
          .group_size = check_group_size(q.size(1), num_kv_heads),
          .head_dim = q.size(2),
          .page_size = page_size,
          .max_chunks = 0,
          .page_summary = check_summary(page_summary, *scorer, num_pages, num_kv_heads, q.size(2), page_size),
          .scorer = scorer,
          .group_reduction = *reduction,
          .sm_scale = static_cast<float>(sm_scale),
          .page_scores = nullptr,
          .row_stride = 0};
}

void run_score_pages(core::ScorePagesParams params, const Batch& batch) {
  const int64_t num_rows = static_cast<int64_t>(batch.rows.size());
  params.rows = batch.rows.data();
  params.max_chunks = ceil_div(batch.max_visible_pages, core::kScoreChunkPages);
  run(cpu::kernels().score_pages, params, num_rows * params.num_kv_heads * params.max_chunks,
      grain_of(kScoredPagesPerThread, batch.max_visible_pages));
}

void run_select_pages(const core::SelectPagesParams& params, const Batch& batch) {
  run(cpu::kernels().select_pages, params, static_cast<int64_t>(batch.rows.size()) * params.num_kv_heads,
      grain_of(kScoredPagesPerThread, batch.max_visible_pages));
}

void run_attend_pages(core::AttendPagesParams params, const Batch& batch, int64_t max_list_pages) {
  const int64_t num_rows = static_cast<int64_t>(batch.rows.size());
  const int64_t num_heads = params.num_kv_heads * params.group_size;
  params.max_chunks = std::max<int64_t>(1, ceil_div(max_list_pages, core::kChunkPages));
  const int64_t floats_per_row = num_heads * params.max_chunks * (params.head_dim + 2);
  const int64_t block =
      std::clamp<int64_t>(kMaxPartialFloats / floats_per_row, 1, std::max<int64_t>(num_rows, 1));
  const int64_t lists = block * params.num_kv_heads;
  params.partials = core::Scratch::reserve(static_cast<size_t>(block * floats_per_row + lists));
  params.chunks_done = reinterpret_cast<int32_t*>(params.partials + block * floats_per_row);

  const core::AttendPagesParams all = params;
  const int64_t element_size = core::element_size(all.q.type);
  for (int64_t first = 0; first < num_rows; first += block) {
    const int64_t rows = std::min(block, num_rows - first);
    params.rows = batch.rows.data() + first;
    params.q.data = static_cast<const char*>(all.q.data) + first * all.q.token_stride * element_size;
    params.out = static_cast<char*>(all.out) + first * num_heads * params.head_dim * element_size;
    params.lse = all.lse + first * num_heads;
    if (all.selected_pages != nullptr) {
      params.selected_pages = all.selected_pages + first * params.num_kv_heads * params.list_width;
      params.num_selected = all.num_selected + first * params.num_kv_heads;
    }
    if (all.page_lse != nullptr) params.page_lse = all.page_lse + first * num_heads * params.list_width;
    std::fill_n(params.chunks_done, lists, 0);
    run(cpu::kernels().attend_pages, params, rows * params.num_kv_heads * params.max_chunks,
        grain_of(kAttendedPagesPerThread, max_list_pages));
  }
}

}  // namespace tinyserve
