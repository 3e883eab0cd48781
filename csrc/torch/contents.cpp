#include "torch/contents.h"

#include <algorithm>

namespace tinyserve {

const int32_t* check_page_ids(const Tensor& page_ids, const char* name, int64_t num_pages) {
  const int32_t* ids = check_int32(page_ids, name, 1, "[num_page_ids]");
  for (int64_t i = 0; i < page_ids.size(0); ++i) {
    TINYSERVE_CHECK(ids[i] >= 0 && ids[i] < num_pages, name, ": expected page ids from 0 to ", num_pages - 1,
                    ", got ", ids[i], " at index ", i);
  }
  return ids;
}

void check_table_entries(const int32_t* table_row, int64_t sequence, int64_t first, int64_t end,
                         int64_t num_pages) {
  for (int64_t page = first; page < end; ++page) {
    TINYSERVE_CHECK(table_row[page] >= 0 && table_row[page] < num_pages,
                    "page_table: expected page ids from 0 to ", num_pages - 1, ", got ", table_row[page],
                    " for sequence ", sequence, ", page ", page);
  }
}

Sequences check_sequences(const Tensor& cu_query_lens, const Tensor& seq_lens, const Tensor* page_table,
                          int64_t max_pages, int64_t num_tokens) {
  const Sequences sequences{check_batch_view(cu_query_lens, seq_lens, page_table, max_pages)};
  const int32_t* starts = sequences.cu_query_lens;
  TINYSERVE_CHECK(starts[0] == 0 && starts[sequences.batch_size] == num_tokens,
                  "cu_query_lens: expected offsets from 0 to the ", num_tokens, " packed tokens, got ",
                  starts[0], " to ", starts[sequences.batch_size]);
  for (int64_t sequence = 0; sequence < sequences.batch_size; ++sequence) {
    TINYSERVE_CHECK(starts[sequence] <= starts[sequence + 1],
                    "cu_query_lens: expected ascending offsets, got ", starts[sequence], " before ",
                    starts[sequence + 1]);
  }
  return sequences;
}

Batch check_batch(const Tensor& cu_query_lens, const Tensor& seq_lens, const Tensor* page_table,
                  int64_t max_pages, int64_t num_tokens, int64_t page_size, int64_t window,
                  int64_t num_pages) {
  check_page_size(page_size);
  check_window(window);
  Batch batch{check_sequences(cu_query_lens, seq_lens, page_table, max_pages, num_tokens), {}, 0};
  batch.rows.reserve(static_cast<size_t>(num_tokens));
  for (int64_t sequence = 0; sequence < batch.batch_size; ++sequence) {
    const int64_t query_len = batch.query_len(sequence);
    const int32_t* table_row = batch.page_table == nullptr ? nullptr : batch.table_row(sequence);
    int64_t first_page = batch.max_pages;
    int64_t end_page = 0;
    for (int64_t i = 0; i < query_len; ++i) {
      const core::Row row =
          core::make_row(table_row, static_cast<int32_t>(sequence), batch.seq_lens[sequence] + i, window);
      batch.max_visible_pages = std::max(batch.max_visible_pages, row.num_visible_pages(page_size));
      if (row.num_tokens > 0) first_page = std::min(first_page, row.first_page(page_size));
      end_page = std::max(end_page, row.end_page(page_size));
      batch.rows.push_back(row);
    }
    TINYSERVE_CHECK(end_page <= batch.max_pages, page_table == nullptr ? "page_scores" : "page_table",
                    ": expected at least ", end_page, " pages for sequence ", sequence, " (seq_lens ",
                    batch.seq_lens[sequence], " and ", query_len, " new tokens), got ", batch.max_pages);
    if (table_row != nullptr && num_pages >= 0) {
      check_table_entries(table_row, sequence, first_page, end_page, num_pages);
    }
  }
  return batch;
}

const int32_t* check_page_budgets(const Tensor& page_budget, const Batch& batch, int64_t max_page_budget,
                                  int64_t num_sink_pages, int64_t num_recent_pages) {
  const int32_t* budgets =
      check_page_budget(page_budget, batch.batch_size, max_page_budget, num_sink_pages, num_recent_pages);
  const int64_t num_forced = num_sink_pages + num_recent_pages;
  for (int64_t sequence = 0; sequence < batch.batch_size; ++sequence) {
    TINYSERVE_CHECK(budgets[sequence] >= num_forced && budgets[sequence] <= max_page_budget,
                    "page_budget: expected from the ", num_forced,
                    " forced pages (num_sink_pages + num_recent_pages) to max_page_budget ", max_page_budget,
                    ", got ", budgets[sequence], " for sequence ", sequence);
  }
  return budgets;
}

}  // namespace tinyserve
