// Page summaries of a problem, sealed by the kernel under test, and their numbers read back by the
// documented byte layout (core/scorer.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/params.h"
#include "core/scorer.h"
#include "drive.h"
#include "elements.h"
#include "paged_problem.h"

namespace tinyserve::cpu::testing {

inline constexpr uint8_t kUntouched = 0xcd;

struct Summaries {
  const core::Scorer* scorer = nullptr;
  int64_t head_dim = 0;
  int64_t page_size = 0;
  int64_t num_kv_heads = 0;
  std::vector<uint8_t> bytes;  // [num_pages, num_kv_heads, summary_bytes]

  Summaries(const core::Scorer& for_scorer, const PagedProblem& problem)
      : scorer(&for_scorer),
        head_dim(problem.shape.head_dim),
        page_size(problem.shape.page_size),
        num_kv_heads(problem.shape.num_kv_heads),
        bytes(problem.num_pages * num_kv_heads * row_bytes(), kUntouched) {}

  int64_t row_bytes() const { return scorer->summary_bytes(head_dim, page_size); }
  core::PageSummaryView view() {
    return {.data = bytes.data(), .page_stride = num_kv_heads * row_bytes(), .head_stride = row_bytes()};
  }
  const uint8_t* row(int64_t page_id, int64_t head) const {
    return bytes.data() + (page_id * num_kv_heads + head) * row_bytes();
  }
  float scale(int64_t page_id, int64_t head, int vector) const {
    float scale;
    std::memcpy(&scale, row(page_id, head) + 4 * vector, 4);
    return scale;
  }
  int code(int64_t page_id, int64_t head, int vector, int64_t d) const {
    return static_cast<int8_t>(row(page_id, head)[core::kSummaryHeaderBytes + vector * head_dim + d]);
  }
  // What the summary says of one channel. For int8 codes the product in fp32, as the kernels take it.
  float number(int64_t page_id, int64_t head, int vector, int64_t d) const {
    if (scorer->quantised) {
      return scale(page_id, head, vector) * static_cast<float>(code(page_id, head, vector, d));
    }
    const int64_t i = vector * head_dim + d;
    const uint8_t* begin = row(page_id, head);
    if (scorer->full_type == ElementType::kFloat32) {
      float x;
      std::memcpy(&x, begin + 4 * i, 4);
      return x;
    }
    uint16_t bits;
    std::memcpy(&bits, begin + 2 * i, 2);
    return static_cast<float>(small_float(scorer->full_type).decode(bits));
  }
};

// The ids of the pages that are full of stored tokens.
inline std::vector<int32_t> full_page_ids(const PagedProblem& problem) {
  std::vector<int32_t> ids;
  for (size_t s = 0; s < problem.sequences.size(); ++s) {
    const int64_t stored = problem.sequences[s].length - problem.sequences[s].num_new;
    for (int64_t page = 0; page < stored / problem.shape.page_size; ++page) {
      if (problem.page_tables[s][page] >= 0) ids.push_back(problem.page_tables[s][page]);
    }
  }
  return ids;
}

inline Summaries seal(const KernelTable& kernels, const PagedProblem& problem, const core::Scorer& scorer,
                      Schedule schedule = {}) {
  Summaries summaries(scorer, problem);
  const std::vector<int32_t> ids = full_page_ids(problem);
  const core::SealPagesParams params{.page_ids = ids.data(),
                                     .num_kv_heads = problem.shape.num_kv_heads,
                                     .head_dim = problem.shape.head_dim,
                                     .page_size = problem.shape.page_size,
                                     .k_pages = problem.k_pages,
                                     .page_summary = summaries.view(),
                                     .scorer = &scorer};
  run(kernels.seal_pages, params, static_cast<int64_t>(ids.size()) * problem.shape.num_kv_heads, schedule);
  return summaries;
}

// A full-precision summary is of the keys' own type.
inline bool fits(const core::Scorer& scorer, const Shape& shape) {
  return scorer.quantised || scorer.full_type == shape.type;
}

}  // namespace tinyserve::cpu::testing
