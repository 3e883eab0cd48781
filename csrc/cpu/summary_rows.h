// The summaries that scoring reads at a time, and the order in which they come from memory.
#pragma once

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

// Query heads per pass over the summaries: their sums and the codes fill 16 vector registers. Scores are held
// page by page, this many side by side.
inline constexpr int64_t kScoreHeads = 4;

// Pages that a kv head scores before the next one has its turn: enough to overlap their chains of dependent
// operations, few enough that all heads' summaries of them stay in the cache.
inline constexpr int64_t kScoreBlockPages = 8;

// Sealed pages of one row of the batch and the kv heads that look at them together.
struct SummaryRows {
  core::PageSummaryView summaries;
  const int32_t* page_ids;  // [num_pages]
  int64_t num_pages;
  int64_t first_head;
  int64_t num_heads;
  int64_t row_bytes;
};

// Asks for summaries row by row in the order of memory, a page's heads and then the next page, at least
// `bytes` and a block ahead of the reading, which goes through the same rows block by block.
class RowsAhead {
 public:
  RowsAhead(const SummaryRows& rows, int64_t bytes) : rows_(rows) {
    const int64_t block_bytes = kScoreBlockPages * rows.num_heads * rows.row_bytes;
    page_ = (bytes + block_bytes - 1) / block_bytes * kScoreBlockPages;
  }

  void step() {
    if (page_ >= rows_.num_pages) return;
    const uint8_t* row = rows_.summaries.row(rows_.page_ids[page_], rows_.first_head + head_);
    for (int64_t offset = 0; offset < rows_.row_bytes; offset += 64) __builtin_prefetch(row + offset, 0, 2);
    if (++head_ < rows_.num_heads) return;
    head_ = 0;
    ++page_;
  }

 private:
  const SummaryRows& rows_;
  int64_t page_;
  int64_t head_ = 0;
};

// Up to kScoreBlockPages pages of one kv head.
struct SummaryBlock {
  const SummaryRows& rows;
  int64_t first_page;
  int64_t num_pages;
  int64_t head;
  RowsAhead& ahead;

  const uint8_t* row(int64_t page) const {
    return rows.summaries.row(rows.page_ids[first_page + page], head);
  }

  // Calls f(summary row, page of the block) for every page.
  template <typename F>
  void for_each(const F& f) const {
    for (int64_t page = 0; page < num_pages; ++page) {
      ahead.step();
      f(row(page), page);
    }
  }
};

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
