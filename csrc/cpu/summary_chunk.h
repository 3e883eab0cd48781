// The sealed pages that one scoring work item looks at, and the order in which their summaries are read.
#pragma once

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Query heads per pass over a chunk: their sums and the codes fill 16 vector registers. Scores of a chunk are
// held page by page, this many side by side.
inline constexpr int64_t kScoreHeads = 4;

struct SummaryChunk {
  core::PageSummaryView summaries;
  const int32_t* page_ids;  // [num_pages]
  int64_t num_pages;        // up to kScoreChunkPages
  int64_t head;
  int64_t row_bytes;

  const uint8_t* row(int64_t page) const { return summaries.row(page_ids[page], head); }
};

// Calls f(summary row, page) for pages [begin, end) of the chunk. The rows of one head lie a page stride
// apart, which the hardware does not foresee, so they are asked for ahead.
template <typename F>
inline void for_each_summary(const SummaryChunk& chunk, int64_t begin, int64_t end, const F& f) {
  constexpr int64_t kAhead = 8;
  for (int64_t page = begin; page < end; ++page) {
    if (page + kAhead < chunk.num_pages) {
      const uint8_t* row = chunk.row(page + kAhead);
      for (int64_t offset = 0; offset < chunk.row_bytes; offset += 64) __builtin_prefetch(row + offset);
    }
    f(chunk.row(page), page);
  }
}

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
