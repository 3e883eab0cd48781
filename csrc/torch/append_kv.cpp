// append_kv and seal_pages: checks, the list of page writes, and the kernels.

#include <algorithm>

#include "cpu/kernel_table.h"
#include "torch/contents.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

// Cuts each sequence's new tokens at page boundaries; tokens at negative positions are padding.
std::vector<core::PageWrite> plan_writes(const Batch& batch, int64_t page_size) {
  std::vector<core::PageWrite> writes;
  for (int64_t sequence = 0; sequence < batch.batch_size; ++sequence) {
    const int64_t begin = batch.cu_query_lens[sequence];
    const int64_t end = batch.cu_query_lens[sequence + 1];
    const int64_t seq_len = batch.seq_lens[sequence];
    int64_t token = begin + std::max<int64_t>(0, -seq_len);
    while (token < end) {
      const int64_t position = seq_len + token - begin;
      const int64_t slot = position % page_size;
      const int64_t count = std::min(page_size - slot, end - token);
      writes.push_back({.page_id = batch.table_row(sequence)[position / page_size],
                        .first_token = static_cast<int32_t>(token),
                        .num_tokens = static_cast<int32_t>(count),
                        .first_slot = static_cast<int32_t>(slot)});
      token += count;
    }
  }
  return writes;
}

void append_kv(Tensor k, Tensor v, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor k_pages,
               Tensor v_pages, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
               std::optional<Tensor> page_summary, std::string scorer) {
  const AppendArguments arguments =
      check_append_kv(k, v, k_pages, v_pages, k_scales, v_scales, page_summary, scorer);
  const KvPools& pools = arguments.pools;
  // A window of 1: only the pages that receive tokens are checked, not the whole history.
  const Batch batch = check_batch(cu_query_lens, seq_lens, &page_table, 0, k.size(0), pools.page_size,
                                  /*window=*/1, pools.num_pages);
  const std::vector<core::PageWrite> writes = plan_writes(batch, pools.page_size);
  const core::AppendKvParams params{.k = arguments.k,
                                    .v = arguments.v,
                                    .writes = writes.data(),
                                    .num_kv_heads = pools.num_kv_heads,
                                    .head_dim = pools.head_dim,
                                    .page_size = pools.page_size,
                                    .k_pages = pools.k,
                                    .v_pages = pools.v,
                                    .page_summary = arguments.page_summary,
                                    .scorer = arguments.scorer};
  run(cpu::kernels().append_kv, params, static_cast<int64_t>(writes.size()) * pools.num_kv_heads,
      /*grain=*/8);
}

void seal_pages(Tensor page_ids, Tensor k_pages, std::optional<Tensor> k_scales, Tensor page_summary,
                std::string scorer) {
  core::SealPagesParams params = check_seal_pages(k_pages, k_scales, page_summary, scorer);
  params.page_ids = check_page_ids(page_ids, "page_ids", params.k_pages.num_pages);
  run(cpu::kernels().seal_pages, params, page_ids.size(0) * params.num_kv_heads, /*grain=*/8);
}

}  // namespace

TINYSERVE_CPU_OPS(m) {
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("seal_pages", TORCH_BOX(&seal_pages));
}

}  // namespace tinyserve
