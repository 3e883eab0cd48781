// prefill_attention: checks, the cut of the rows into blocks, and the kernel.

#include <algorithm>
#include <limits>

#include "core/limits.h"
#include "cpu/kernel_table.h"
#include "torch/contents.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> prefill_attention(Tensor q, Tensor k, Tensor v, Tensor cu_query_lens,
                                             Tensor seq_lens, Tensor page_table, Tensor k_pages,
                                             Tensor v_pages, std::optional<Tensor> k_scales,
                                             std::optional<Tensor> v_scales, double sm_scale, int64_t window,
                                             double softcap) {
  PrefillArguments prefill =
      check_prefill_attention(q, k, v, k_pages, v_pages, k_scales, v_scales, sm_scale, window, softcap);
  const KvPools& pools = prefill.pools;
  core::PrefillAttentionParams& params = prefill.params;
  const Sequences sequences = check_sequences(cu_query_lens, seq_lens, &page_table, 0, q.size(0));
  // Only pages of stored tokens are read; those of the new tokens need not exist yet.
  const int64_t block_rows = core::kPrefillQueries / params.group_size;
  std::vector<core::PrefillBlock> blocks;
  for (int64_t sequence = 0; sequence < sequences.batch_size; ++sequence) {
    const int64_t seq_len = sequences.seq_lens[sequence];
    const int64_t padding = std::max<int64_t>(0, -seq_len);
    const int64_t num_rows = sequences.query_len(sequence) - padding;
    if (num_rows <= 0) continue;
    const int64_t stored = std::max<int64_t>(seq_len, 0);
    const int64_t stored_pages = (stored + pools.page_size - 1) / pools.page_size;
    TINYSERVE_CHECK(stored_pages <= sequences.max_pages, "page_table: expected at least ", stored_pages,
                    " pages for sequence ", sequence, " (seq_lens ", stored, "), got ", sequences.max_pages);
    const int64_t first_seen = window > 0 ? std::max<int64_t>(0, stored - window + 1) / pools.page_size : 0;
    const int32_t* table_row = sequences.table_row(sequence);
    check_table_entries(table_row, sequence, first_seen, stored_pages, pools.num_pages);
    const int64_t first_row = sequences.cu_query_lens[sequence] + padding;
    for (int64_t row = 0; row < num_rows; row += block_rows) {
      blocks.push_back({.page_table = table_row,
                        .first_row = first_row + row,
                        .num_rows = std::min(block_rows, num_rows - row),
                        .first_position = stored + row,
                        .stored = stored,
                        .first_new_row = first_row});
    }
  }
  // The longest blocks first: a thread that takes the last one late would keep the others waiting.
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const core::PrefillBlock& a, const core::PrefillBlock& b) {
                     return a.first_position > b.first_position;
                   });

  // What a row that sees nothing is left with.
  torch::stable::zero_(prefill.out);
  std::fill_n(params.lse, prefill.lse.numel(), -std::numeric_limits<float>::infinity());
  params.blocks = blocks.data();
  run(cpu::kernels().prefill_attention, params, static_cast<int64_t>(blocks.size()) * pools.num_kv_heads);
  return {prefill.out, prefill.lse};
}

}  // namespace

TINYSERVE_CPU_OPS(m) { m.impl("prefill_attention", TORCH_BOX(&prefill_attention)); }

}  // namespace tinyserve
