"""Softmax attention over pages, and the merge of partial results by log-sum-exp.

A row that may attend to nothing gives zeros and lse -inf. Slots that a row may not see never enter a
product: their logits are -inf and their values 0, because 0 * NaN is NaN and unused slots hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyserve_ops.reference import checks
from tinyserve_ops.reference.quantisation import dequantise
from tinyserve_ops.reference.rows import Row, page_positions, rows_of
from tinyserve_ops.reference.scoring import score_pages
from tinyserve_ops.reference.selection import select_pages


def attend_pages(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    selected_pages: Tensor | None,
    num_selected: Tensor | None,
    sm_scale: float,
    window: int = -1,
    softcap: float = 0.0,
    return_page_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each row over its selected pages, or over all visible pages when `selected_pages` is None.

    Returns:
        out of q's dtype [num_tokens, num_heads, head_dim], lse fp32 [num_tokens, num_heads], and page_lse
        fp32 [num_tokens, num_heads, list width]: the log-sum-exp of each listed page alone, -inf padded.
        Entry i belongs to page i of the row's list (all pages: the i-th visible one). Shape [0] when not
        requested.
    """
    checks.check_attend_pages(
        q, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales, v_scales, selected_pages,
        num_selected, window, softcap,
    )  # fmt: skip
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    list_width = page_table.shape[1] if selected_pages is None else selected_pages.shape[2]
    out = torch.zeros(q.shape)
    lse = torch.full((num_tokens, num_heads), -torch.inf)
    page_lse = torch.full((num_tokens, num_heads, list_width), -torch.inf)
    for row in rows_of(cu_query_lens, seq_lens, window):
        queries = (
            q[row.token].float().unflatten(0, (num_kv_heads, -1))
        )  # [num_kv_heads, group_size, head_dim]
        for head in range(num_kv_heads):
            pages = _page_list(row, head, page_size, selected_pages, num_selected)
            seen = row.sees(page_positions(pages, page_size)).flatten()
            if not seen.any():
                continue
            page_ids = page_table[row.sequence, pages]
            keys = _read_pages(k_pages, k_scales, page_ids, head)
            values = _read_pages(v_pages, v_scales, page_ids, head)
            logits = sm_scale * (queries[head] @ keys.T)
            logits = logits.masked_fill(~seen, -torch.inf)
            group = slice(head * queries.shape[1], (head + 1) * queries.shape[1])
            out[row.token, group], lse[row.token, group] = _softmax_attention(logits, values, seen)
            page_lse[row.token, group, : len(pages)] = logits.unflatten(1, (len(pages), page_size)).logsumexp(
                2
            )
    return out.to(q.dtype), lse, page_lse if return_page_lse else torch.empty(0)


def sparse_decode(
    q: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    page_summary: Tensor,
    page_budget: Tensor,
    max_page_budget: int,
    scorer: str,
    group_reduction: str,
    sm_scale: float,
    num_sink_pages: int,
    num_recent_pages: int,
    window: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query-aware sparse attention (TinyServe, arXiv 2509.12211, algorithm 1): score, select, attend.

    Returns:
        out, lse as `attend_pages`; selected_pages, num_selected as `select_pages`.
    """
    checks.check_kv_pages(k_pages, v_pages, k_scales, v_scales)
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    checks.check_heads(q, num_kv_heads, head_dim)
    checks.check_scorer_dtype(scorer, k_pages)
    checks.check_summary(page_summary, scorer, num_kv_heads, head_dim, num_pages)
    page_scores = score_pages(
        q,
        cu_query_lens,
        seq_lens,
        page_table,
        page_summary,
        page_size,
        scorer,
        group_reduction,
        sm_scale,
        window,
    )
    selected_pages, num_selected = select_pages(
        page_scores, cu_query_lens, seq_lens, page_budget, max_page_budget, page_size, num_sink_pages,
        num_recent_pages, window,
    )  # fmt: skip
    out, lse, _ = attend_pages(
        q, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales, v_scales, selected_pages,
        num_selected, sm_scale, window, softcap,
    )  # fmt: skip
    return out, lse, selected_pages, num_selected


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combines attention over disjoint sets of tokens: lse = log sum exp(lse_i), out = sum exp(lse_i - lse)
    out_i.

    Args:
        outs: [num_states, num_tokens, num_heads, head_dim].
        lses: fp32 [num_states, num_tokens, num_heads]; a state with lse -inf attended to nothing and is left
        out.

    Returns:
        out of outs' dtype [num_tokens, num_heads, head_dim], and lse fp32 [num_tokens, num_heads].
    """
    checks.check_merge_states(outs, lses)
    empty = lses == -torch.inf
    weights = lses.softmax(0).masked_fill(empty, 0.0)
    states = outs.float().masked_fill(empty[..., None], 0.0)
    return (weights[..., None] * states).sum(0).to(outs.dtype), lses.logsumexp(0)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    sm_scale: float,
    window: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention of new tokens over the stored ones (from the pages) and over themselves (from k and
    v).

    Returns:
        out of q's dtype [num_tokens, num_heads, head_dim] and lse fp32 [num_tokens, num_heads].
    """
    checks.check_prefill_attention(
        q, k, v, cu_query_lens, seq_lens, page_table, k_pages, v_pages, k_scales, v_scales, window, softcap
    )
    num_kv_heads, page_size = k_pages.shape[1:3]
    out = torch.zeros(q.shape)
    lse = torch.full(q.shape[:2], -torch.inf)
    for row in rows_of(cu_query_lens, seq_lens, window):
        if row.position < 0:
            continue
        stored_len = int(seq_lens[row.sequence])
        pages = torch.arange(-(-max(stored_len, 0) // page_size))
        page_ids = page_table[row.sequence, pages]
        first_token = row.token - (row.position - stored_len)
        # A negative stored length means that the first new tokens are padding: their positions are negative.
        positions = torch.cat([torch.arange(max(stored_len, 0)), torch.arange(stored_len, row.position + 1)])
        seen = row.sees(positions)
        queries = q[row.token].float().unflatten(0, (num_kv_heads, -1))
        for head in range(num_kv_heads):
            keys, values = (
                torch.cat(
                    [
                        _read_pages(pool, scales, page_ids, head)[: max(stored_len, 0)],
                        new[first_token : row.token + 1, head].float(),
                    ]
                )
                for pool, scales, new in ((k_pages, k_scales, k), (v_pages, v_scales, v))
            )
            logits = sm_scale * (queries[head] @ keys.T)
            logits = logits.masked_fill(~seen, -torch.inf)
            group = slice(head * queries.shape[1], (head + 1) * queries.shape[1])
            out[row.token, group], lse[row.token, group] = _softmax_attention(logits, values, seen)
    return out.to(q.dtype), lse


def _read_pages(pages: Tensor, scales: Tensor | None, page_ids: Tensor, head: int) -> Tensor:
    """Tokens of one kv head in pages `page_ids`, fp32 [n * page_size, head_dim]."""
    tokens = dequantise(pages[page_ids, head], None if scales is None else scales[page_ids, head])
    return tokens.flatten(0, 1)


def _page_list(
    row: Row, head: int, page_size: int, selected_pages: Tensor | None, num_selected: Tensor | None
) -> Tensor:
    if selected_pages is None or num_selected is None:
        visible = row.visible_pages(page_size)
        return torch.arange(visible.start, visible.stop)
    return selected_pages[row.token, head, : int(num_selected[row.token, head])].long()


def _softmax_attention(logits: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """logits [group_size, n], -inf where not seen; values [n, head_dim] -> out, lse of the group."""
    lse = logits.logsumexp(1)
    weights = logits.softmax(1)  # not exp(logits - lse): a large lse has lost its fraction
    return weights @ values.masked_fill(~seen[:, None], 0.0), lse
