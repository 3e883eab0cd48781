// One query row (a token of the packed batch) and what it may see. Position p sees stored tokens
// (p - window, p]; a negative position is a padding slot that sees nothing. constexpr, so that CUDA kernels
// take it, too.
#pragma once

#include <cstdint>

namespace tinyserve::core {

struct Row {
  const int32_t* page_table = nullptr;  // logical page -> page id, of the row's sequence
  int32_t sequence = 0;                 // index into the batch
  int64_t first_token = 0;              // first visible stored position
  int64_t num_tokens = 0;               // end of the visible positions; 0 where nothing is visible

  constexpr int64_t first_page(int64_t page_size) const { return first_token / page_size; }
  constexpr int64_t end_page(int64_t page_size) const { return (num_tokens + page_size - 1) / page_size; }
  constexpr int64_t num_visible_pages(int64_t page_size) const {
    return end_page(page_size) - first_page(page_size);
  }
};

constexpr Row make_row(const int32_t* page_table, int32_t sequence, int64_t position, int64_t window) {
  Row row{.page_table = page_table, .sequence = sequence};
  if (position < 0) return row;
  row.num_tokens = position + 1;
  if (window > 0 && position + 1 > window) row.first_token = position + 1 - window;
  return row;
}

}  // namespace tinyserve::core
