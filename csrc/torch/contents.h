// Checks of what lengths, page tables, page lists and budgets hold, for ops on the CPU: there a wrong number
// is refused by name. The host may not read the memory of another device; what kernels there do with wrong
// numbers is said in docs/design.md.
#pragma once

#include <cstdint>
#include <vector>

#include "core/params.h"
#include "core/row.h"
#include "torch/checks.h"

namespace tinyserve {

// The sequences of a packed batch: offsets ascending from 0 to num_tokens.
struct Sequences : core::BatchView {
  const int32_t* table_row(int64_t sequence) const { return page_table + sequence * page_table_stride; }
  int64_t query_len(int64_t sequence) const { return cu_query_lens[sequence + 1] - cu_query_lens[sequence]; }
};
Sequences check_sequences(const Tensor& cu_query_lens, const Tensor& seq_lens, const Tensor* page_table,
                          int64_t max_pages, int64_t num_tokens);

// The same with one Row per new token, and the number of visible pages of the longest row.
struct Batch : Sequences {
  std::vector<core::Row> rows;
  int64_t max_visible_pages = 0;
};

// `num_pages` >= 0 also checks the page ids of every logical page that a row sees.
Batch check_batch(const Tensor& cu_query_lens, const Tensor& seq_lens, const Tensor* page_table,
                  int64_t max_pages, int64_t num_tokens, int64_t page_size, int64_t window,
                  int64_t num_pages);

// Page ids of logical pages [first, end) of one sequence.
void check_table_entries(const int32_t* table_row, int64_t sequence, int64_t first, int64_t end,
                         int64_t num_pages);

// `page_ids` int32 [n], each in [0, num_pages).
const int32_t* check_page_ids(const Tensor& page_ids, const char* name, int64_t num_pages);

// check_page_budget, and each budget from the number of forced pages to `max_page_budget`.
const int32_t* check_page_budgets(const Tensor& page_budget, const Batch& batch, int64_t max_page_budget,
                                  int64_t num_sink_pages, int64_t num_recent_pages);

}  // namespace tinyserve
