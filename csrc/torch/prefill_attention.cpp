// prefill_attention: several new tokens per sequence, over the stored tokens and over themselves. Blocks are
// handed to torch's CPU flash attention and joined by their log-sum-exp, so no length x length mask exists.
// All blocks are computed in fp32: more accurate than 16-bit blocks, and faster on CPUs without 16-bit matrix units.

#include <algorithm>
#include <array>
#include <limits>

#include <torch/csrc/stable/library.h>

#include "cpu/kernel_table.h"
#include "torch/checks.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

constexpr int64_t kStoredBlock = 4096;  // stored tokens made dense at a time
constexpr int64_t kWindowBlock = 256;   // query rows that share one small mask under a sliding window

struct State {
  Tensor out;  // [1, num_heads, num_rows, head_dim]
  Tensor lse;  // [1, num_heads, num_rows]
};

State flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, const std::optional<Tensor>& mask,
                      double sm_scale) {
  std::array<StableIValue, 7> stack{torch::stable::detail::from(q),
                                    torch::stable::detail::from(k),
                                    torch::stable::detail::from(v),
                                    torch::stable::detail::from(0.0),
                                    torch::stable::detail::from(causal),
                                    torch::stable::detail::from(mask),
                                    torch::stable::detail::from(std::optional<double>(sm_scale))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_scaled_dot_product_flash_attention_for_cpu", "", stack.data(),
                                               TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

Tensor as_float(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float ? tensor : torch::stable::to(tensor, ScalarType::Float);
}

// Rows [first, first + count) of a packed tensor as [1, heads, count, head_dim].
Tensor packed_rows(Tensor tensor, int64_t first, int64_t count) {
  Tensor rows = torch::stable::narrow(tensor, 0, first, count);
  return torch::stable::unsqueeze(torch::stable::transpose(rows, 0, 1), 0);
}

void copy_rows(const Tensor& from, Tensor to, int64_t first, int64_t count) {
  Tensor rows = packed_rows(to, first, count);
  torch::stable::copy_(rows, from);
}

// One sequence's share of the op. Row i of the sequence is packed row `first_row + i`, at position stored + i.
class SequencePrefill {
 public:
  SequencePrefill(const KvPools& pools, const int32_t* table_row, Tensor q, Tensor k, Tensor v, int64_t first_row,
                  int64_t num_rows, int64_t stored, double sm_scale)
      : pools_(pools),
        table_row_(table_row),
        q_(std::move(q)),
        k_(std::move(k)),
        v_(std::move(v)),
        first_row_(first_row),
        num_rows_(num_rows),
        stored_(stored),
        sm_scale_(sm_scale) {}

  // out [num_tokens, num_heads, head_dim] fp32, lse [num_tokens, num_heads].
  void causal(Tensor out, Tensor lse) const {
    const Tensor rows = packed_rows(q_, first_row_, num_rows_);
    const State own = flash_attention(rows, packed_rows(k_, first_row_, num_rows_),
                                      packed_rows(v_, first_row_, num_rows_), /*causal=*/true, std::nullopt, sm_scale_);
    if (stored_ == 0) {
      write(own, out, lse, 0, num_rows_);
      return;
    }
    // Slot 0 holds the joined result, slot 1 the next block.
    const int64_t num_heads = q_.size(1);
    Tensor outs = empty_cpu({2, num_rows_, num_heads, pools_.head_dim}, ScalarType::Float);
    Tensor lses = empty_cpu({2, num_rows_, num_heads}, ScalarType::Float);
    write(own, torch::stable::select(outs, 0, 0), torch::stable::select(lses, 0, 0), -first_row_, num_rows_);
    for (int64_t begin = 0; begin < stored_; begin += kStoredBlock) {
      const int64_t count = std::min(kStoredBlock, stored_ - begin);
      const State block = flash_attention(rows, gather(pools_.k, begin, count), gather(pools_.v, begin, count),
                                          /*causal=*/false, std::nullopt, sm_scale_);
      write(block, torch::stable::select(outs, 0, 1), torch::stable::select(lses, 0, 1), -first_row_, num_rows_);
      const core::MergeStatesParams merge{.outs = outs.const_data_ptr(),
                                          .lses = static_cast<const float*>(lses.const_data_ptr()),
                                          .type = core::ElementType::kFloat32,
                                          .num_states = 2,
                                          .num_rows_heads = num_rows_ * num_heads,
                                          .head_dim = pools_.head_dim,
                                          .out = outs.mutable_data_ptr(),
                                          .lse = static_cast<float*>(lses.mutable_data_ptr())};
      run(cpu::kernels().merge_states, merge, merge.num_rows_heads, /*grain=*/64);
    }
    Tensor out_rows = torch::stable::narrow(out, 0, first_row_, num_rows_);
    Tensor lse_rows = torch::stable::narrow(lse, 0, first_row_, num_rows_);
    torch::stable::copy_(out_rows, torch::stable::select(outs, 0, 0));
    torch::stable::copy_(lse_rows, torch::stable::select(lses, 0, 0));
  }

  void windowed(int64_t window, Tensor out, Tensor lse) const {
    for (int64_t begin = 0; begin < num_rows_; begin += kWindowBlock) {
      const int64_t count = std::min(kWindowBlock, num_rows_ - begin);
      const int64_t first_position = stored_ + begin;
      const int64_t first_key = std::max<int64_t>(0, first_position - window + 1);
      const int64_t num_keys = first_position + count - first_key;
      const State block = flash_attention(packed_rows(q_, first_row_ + begin, count), keys(pools_.k, k_, first_key, num_keys),
                                          keys(pools_.v, v_, first_key, num_keys), /*causal=*/false,
                                          window_mask(first_position, count, first_key, num_keys, window), sm_scale_);
      write(block, out, lse, begin, count);
    }
  }

 private:
  // Stored tokens [begin, begin + count) as fp32 [1, num_kv_heads, count, head_dim].
  Tensor gather(const core::PagePoolView& pool, int64_t begin, int64_t count) const {
    Tensor dense = empty_cpu({1, pools_.num_kv_heads, count, pools_.head_dim}, ScalarType::Float);
    gather_into(pool, begin, count, dense);
    return dense;
  }

  void gather_into(const core::PagePoolView& pool, int64_t begin, int64_t count, const Tensor& dense) const {
    const core::GatherTokensParams params{.pages = pool,
                                          .page_table = table_row_,
                                          .page_size = pools_.page_size,
                                          .head_dim = pools_.head_dim,
                                          .first_token = begin,
                                          .num_tokens = count,
                                          .dense = dense.mutable_data_ptr(),
                                          .type = core::ElementType::kFloat32,
                                          .dense_head_stride = dense.stride(1)};
    run(cpu::kernels().gather_tokens, params, pools_.num_kv_heads);
  }

  // Tokens [begin, begin + count), the stored ones from the pages and the new ones from `fresh`.
  Tensor keys(const core::PagePoolView& pool, const Tensor& fresh, int64_t begin, int64_t count) const {
    Tensor dense = empty_cpu({1, pools_.num_kv_heads, count, pools_.head_dim}, ScalarType::Float);
    const int64_t from_pages = std::clamp<int64_t>(stored_ - begin, 0, count);
    if (from_pages > 0) gather_into(pool, begin, from_pages, dense);
    if (from_pages < count) {
      const int64_t first_new = begin + from_pages - stored_;
      Tensor rest = torch::stable::narrow(dense, 2, from_pages, count - from_pages);
      torch::stable::copy_(rest, packed_rows(fresh, first_row_ + first_new, count - from_pages));
    }
    return dense;
  }

  static Tensor window_mask(int64_t first_position, int64_t num_queries, int64_t first_key, int64_t num_keys,
                            int64_t window) {
    Tensor mask = empty_cpu({1, 1, num_queries, num_keys}, ScalarType::Float);
    float* entry = static_cast<float*>(mask.mutable_data_ptr());
    for (int64_t i = 0; i < num_queries; ++i) {
      for (int64_t j = 0; j < num_keys; ++j) {
        const int64_t distance = first_position + i - (first_key + j);
        *entry++ = distance >= 0 && distance < window ? 0.0F : -std::numeric_limits<float>::infinity();
      }
    }
    return mask;
  }

  // Rows [begin, begin + count) of this sequence, at packed rows first_row_ + begin of the results.
  void write(const State& state, const Tensor& out, const Tensor& lse, int64_t begin, int64_t count) const {
    copy_rows(state.out, out, first_row_ + begin, count);
    Tensor lse_rows = torch::stable::narrow(const_cast<Tensor&>(lse), 0, first_row_ + begin, count);
    torch::stable::copy_(lse_rows, torch::stable::transpose(torch::stable::select(state.lse, 0, 0), 0, 1));
  }

  const KvPools& pools_;
  const int32_t* table_row_;
  Tensor q_, k_, v_;  // packed, fp32
  int64_t first_row_;
  int64_t num_rows_;
  int64_t stored_;
  double sm_scale_;
};

std::tuple<Tensor, Tensor> prefill_attention(Tensor q, Tensor k, Tensor v, Tensor cu_query_lens, Tensor seq_lens,
                                             Tensor page_table, Tensor k_pages, Tensor v_pages,
                                             std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                                             double sm_scale, int64_t window, double softcap) {
  const KvPools pools = check_pools(k_pages, v_pages, k_scales, v_scales);
  check_softcap(softcap);
  Tensor keep_q, keep_k, keep_v;
  check_packed(q, "q", keep_q);
  check_packed(k, "k", keep_k);
  check_packed(v, "v", keep_v);
  check_size(q, "q", 2, pools.head_dim, "head_dim of k_pages");
  check_group_size(q.size(1), pools.num_kv_heads);
  check_size(k, "k", 0, q.size(0), "num_tokens of q");
  check_size(k, "k", 1, pools.num_kv_heads, "num_kv_heads of k_pages");
  check_size(k, "k", 2, pools.head_dim, "head_dim of k_pages");
  TINYSERVE_CHECK(shape_text(v) == shape_text(k), "v: expected the shape of k, ", shape_text(k), ", got ",
                  shape_text(v));
  // Only pages of stored tokens are read; those of the new tokens need not exist yet.
  check_window(window);
  const int32_t* stored_lens = check_int32(seq_lens, "seq_lens", 1, "[batch]");
  const int64_t batch_size = seq_lens.size(0);
  const int32_t* starts = check_int32(cu_query_lens, "cu_query_lens", 1, "[batch + 1]");
  check_size(cu_query_lens, "cu_query_lens", 0, batch_size + 1, "batch + 1");
  const int32_t* table = check_int32(page_table, "page_table", 2, "[batch, max_pages]");
  check_size(page_table, "page_table", 0, batch_size, "batch");
  check_starts(starts, batch_size, q.size(0));
  for (int64_t sequence = 0; sequence < batch_size; ++sequence) {
    if (starts[sequence] == starts[sequence + 1]) continue;
    const int64_t stored_pages = (std::max<int64_t>(stored_lens[sequence], 0) + pools.page_size - 1) / pools.page_size;
    TINYSERVE_CHECK(stored_pages <= page_table.size(1), "page_table: expected at least ", stored_pages,
                    " pages for sequence ", sequence, " (seq_lens ", stored_lens[sequence], "), got ",
                    page_table.size(1));
    const int64_t first_seen =
        window > 0 ? std::max<int64_t>(0, stored_lens[sequence] - window + 1) / pools.page_size : 0;
    check_table_entries(table + sequence * page_table.stride(0), sequence, first_seen, stored_pages, pools.num_pages);
  }

  const Tensor q32 = as_float(keep_q), k32 = as_float(keep_k), v32 = as_float(keep_v);
  Tensor out = torch::stable::new_zeros(q32, {q.size(0), q.size(1), q.size(2)});
  Tensor lse = torch::stable::full({q.size(0), q.size(1)}, -std::numeric_limits<double>::infinity(), ScalarType::Float);
  for (int64_t sequence = 0; sequence < batch_size; ++sequence) {
    const int64_t padding = std::max<int64_t>(0, -stored_lens[sequence]);
    const int64_t num_rows = starts[sequence + 1] - starts[sequence] - padding;
    if (num_rows <= 0) continue;
    const int64_t stored = std::max<int64_t>(0, stored_lens[sequence]);
    const SequencePrefill prefill(pools, table + sequence * page_table.stride(0), q32, k32, v32,
                                  starts[sequence] + padding, num_rows, stored, sm_scale);
    if (window > 0 && stored + num_rows > window) {
      prefill.windowed(window, out, lse);
    } else {
      prefill.causal(out, lse);
    }
  }
  return {q.scalar_type() == ScalarType::Float ? out : torch::stable::to(out, q.scalar_type()), lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tinyserve, CPU, m) { m.impl("prefill_attention", TORCH_BOX(&prefill_attention)); }

}  // namespace tinyserve
