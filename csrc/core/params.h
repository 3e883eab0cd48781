// One plain struct per kernel: what it reads and writes, with the shape after each pointer. Filled by
// csrc/torch (or a C++ test) after every check has passed; kernels trust it.
#pragma once

#include <cstdint>

#include "core/element_type.h"
#include "core/page_pool_view.h"
#include "core/row.h"
#include "core/scorer.h"

namespace tinyserve::core {

// A strided [num_tokens, num_heads, head_dim] tensor; head_dim has stride 1.
struct PackedView {
  const void* data = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// New tokens that fall into one page of one sequence.
struct PageWrite {
  int64_t page_id;
  int32_t first_token;  // packed token index
  int32_t num_tokens;
  int32_t first_slot;  // slot of first_token inside the page
};

// Sequences of a packed batch, as kernels read them that plan on the device. Tokens from
// cu_query_lens[batch_size] on are padding.
struct BatchView {
  const int32_t* cu_query_lens;  // [batch_size + 1]
  const int32_t* seq_lens;       // [batch_size], before the new tokens; new token i sits at seq_lens + i
  const int32_t* page_table;     // [batch_size, max_pages], -1 where none
  int64_t page_table_stride;
  int64_t batch_size;
  int64_t max_pages;
  int64_t first_row = 0;  // packed token of a launch's row 0, where it takes a part of the rows
};

struct AppendKvParams {
  PackedView k;  // [num_tokens, num_kv_heads, head_dim]
  PackedView v;
  const PageWrite* writes;  // [num_writes]
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t page_size;
  PagePoolView k_pages;
  PagePoolView v_pages;
  PageSummaryView page_summary;  // may be null
  const Scorer* scorer;          // may be null with page_summary
};

// append_kv from the batch itself, where the host can't plan the writes.
struct AppendKvBatchParams {
  PackedView k;  // [num_tokens, num_kv_heads, head_dim]
  PackedView v;
  BatchView batch;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t page_size;
  PagePoolView k_pages;
  PagePoolView v_pages;
  PageSummaryView page_summary;  // may be null
  const Scorer* scorer;          // may be null with page_summary
};

struct SealPagesParams {
  const int32_t* page_ids;  // [num_page_ids]
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t page_size;
  PagePoolView k_pages;
  PageSummaryView page_summary;
  const Scorer* scorer;
};

struct ScorePagesParams {
  PackedView q;     // [num_rows, num_heads, head_dim]
  const Row* rows;  // [num_rows]
  int64_t num_kv_heads;
  int64_t group_size;
  int64_t head_dim;
  int64_t page_size;
  int64_t max_chunks;  // chunks of kScoreChunkPages that cover the longest row
  PageSummaryView page_summary;
  const Scorer* scorer;
  GroupReduction group_reduction;
  float sm_scale;
  float* page_scores;  // [num_rows, num_kv_heads, row_stride], indexed by logical page
  float* head_scores;  // [num_rows, num_heads, row_stride]; null unless the reduction is kSoftmax
  int64_t row_stride;
};

// The same from the batch itself. All of page_scores is written: -inf where a row does not see the page.
struct ScorePagesBatchParams {
  PackedView q;  // [num_rows, num_heads, head_dim]
  BatchView batch;
  int64_t num_rows;
  int64_t num_kv_heads;
  int64_t group_size;
  int64_t head_dim;
  int64_t page_size;
  int64_t window;  // -1: none
  PageSummaryView page_summary;
  const Scorer* scorer;
  GroupReduction group_reduction;
  float sm_scale;
  float* page_scores;  // [num_rows, num_kv_heads, row_stride], indexed by logical page
  float* head_scores;  // [num_rows, num_heads, row_stride]; null unless the reduction is kSoftmax
  int64_t row_stride;  // at least batch.max_pages
};

struct SelectPagesParams {
  const float* page_scores;  // [num_rows, num_kv_heads, row_stride]
  int64_t row_stride;
  const Row* rows;             // [num_rows]
  const int32_t* page_budget;  // [batch]
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t num_sink_pages;
  int64_t num_recent_pages;
  int64_t max_page_budget;
  int32_t* selected_pages;  // [num_rows, num_kv_heads, max_page_budget]
  int32_t* num_selected;    // [num_rows, num_kv_heads]
};

// The same from the batch itself, where the host can't know the rows. batch.page_table is not read, and
// batch.max_pages bounds what a row sees.
struct SelectPagesBatchParams {
  const float* page_scores;  // [num_rows, num_kv_heads, row_stride]
  int64_t row_stride;        // at least batch.max_pages
  BatchView batch;
  const int32_t* page_budget;  // [batch_size]
  int64_t num_rows;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t window;  // -1: none
  int64_t num_sink_pages;
  int64_t num_recent_pages;
  int64_t max_page_budget;  // at least the forced pages
  int32_t* selected_pages;  // [num_rows, num_kv_heads, max_page_budget]
  int32_t* num_selected;    // [num_rows, num_kv_heads]
};

struct AttendPagesParams {
  PackedView q;  // [num_rows, num_heads, head_dim]
  const Row* rows;
  int64_t num_kv_heads;
  int64_t group_size;
  int64_t head_dim;
  int64_t page_size;
  PagePoolView k_pages;
  PagePoolView v_pages;
  const int32_t* selected_pages;  // [num_rows, num_kv_heads, list_width]; null: every visible page
  const int32_t* num_selected;    // [num_rows, num_kv_heads]; null with selected_pages
  int64_t list_width;
  int64_t max_chunks;  // chunks that cover the longest list: of kChunkPages, in CUDA of cuda/attend_chunks.h
  float sm_scale;
  float* partials;       // [num_rows, num_kv_heads, max_chunks, group_size, head_dim + 2]: acc, max, sum
  int32_t* chunks_done;  // [num_rows, num_kv_heads], zeros
  float* page_lse;       // [num_rows, num_heads, list_width]; may be null
  void* out;             // [num_rows, num_heads, head_dim], contiguous, of q's type
  float* lse;            // [num_rows, num_heads]
};

// attend_pages from the batch itself, where the host does not know the rows: row i is packed token i.
struct AttendPagesBatchParams {
  AttendPagesParams attend;  // rows: null
  BatchView batch;
  int64_t num_rows;
  int64_t window;  // -1: none
};

struct MergeStatesParams {
  const void* outs;   // [num_states, num_rows, num_heads, head_dim], contiguous
  const float* lses;  // [num_states, num_rows, num_heads]
  ElementType type;
  int64_t num_states;
  int64_t num_rows_heads;  // num_rows * num_heads
  int64_t head_dim;
  void* out;
  float* lse;
};

// Consecutive query rows of one sequence that share their key tiles.
struct PrefillBlock {
  const int32_t* page_table;
  int64_t first_row;  // packed row
  int64_t num_rows;
  int64_t first_position;  // stored position of first_row
  int64_t stored;          // positions below come from the pages
  int64_t first_new_row;   // packed row of position `stored`
};

struct PrefillAttentionParams {
  PackedView q;  // [num_rows, num_heads, head_dim]
  PackedView k;  // [num_rows, num_kv_heads, head_dim]
  PackedView v;
  const PrefillBlock* blocks;  // [num_blocks]
  int64_t num_kv_heads;
  int64_t group_size;
  int64_t head_dim;
  int64_t page_size;
  PagePoolView k_pages;
  PagePoolView v_pages;
  int64_t window;  // -1: none
  float sm_scale;
  void* out;   // [num_rows, num_heads, head_dim], contiguous, of q's type
  float* lse;  // [num_rows, num_heads]
};

// The same from the batch itself, where the host can't cut the rows into blocks.
struct PrefillAttentionBatchParams {
  PrefillAttentionParams attention;  // blocks: null
  BatchView batch;
  int64_t num_rows;
};

// One of the tensors that make up pages, as blocks [page, head] of `rows` x `columns` elements of any type.
// Strides and sizes in bytes.
struct PagePart {
  char* data;
  int64_t num_heads;
  int64_t page_stride;
  int64_t head_stride;
  int64_t rows;
  int64_t row_stride;
  int64_t columns;
  int64_t column_stride;
  int64_t element_size;

  // Whether a block is one piece of memory, and rows or columns are what is next to each other in it.
  constexpr bool rows_are_dense() const {
    return column_stride == element_size && (rows == 1 || row_stride == columns * element_size);
  }
  constexpr bool columns_are_dense() const {
    return row_stride == element_size && (columns == 1 || column_stride == rows * element_size);
  }
};

// Both parts have the same sizes.
struct MovePagesParams {
  PagePart from;
  const int32_t* from_ids;  // [num_pages]; null: page i is page i
  PagePart to;
  const int32_t* to_ids;  // [num_pages]; null likewise
  int64_t num_pages;

  // Whether blocks can be copied as they lie.
  constexpr bool same_order() const {
    return (from.rows_are_dense() && to.rows_are_dense()) ||
           (from.columns_are_dense() && to.columns_are_dense());
  }
};

}  // namespace tinyserve::core
