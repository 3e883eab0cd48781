"""Exact top-K pages of a row: the forced ones first, then the best scores.

The order is total, so the result depends on nothing but the scores: higher score first, ties (-0.0 equals
0.0) to the lower page, NaN below everything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinyserve_ops.reference import checks
from tinyserve_ops.reference.rows import rows_of


def select_pages(
    page_scores: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    page_budget: Tensor,
    max_page_budget: int,
    page_size: int,
    num_sink_pages: int,
    num_recent_pages: int,
    window: int = -1,
) -> tuple[Tensor, Tensor]:
    """Selects min(page_budget of the sequence, visible pages) pages per row and kv head.

    Forced: the first `num_sink_pages` pages of the sequence and the last `num_recent_pages` visible ones;
    pages that the window hides do not exist.

    Returns:
        selected_pages int32 [num_tokens, num_kv_heads, max_page_budget], ascending, padded with -1; and
        num_selected int32 [num_tokens, num_kv_heads].
    """
    checks.check_select_pages(
        page_scores,
        cu_query_lens,
        seq_lens,
        page_budget,
        max_page_budget,
        page_size,
        num_sink_pages,
        num_recent_pages,
        window,
    )
    num_tokens, num_kv_heads, _ = page_scores.shape
    selected_pages = torch.full((num_tokens, num_kv_heads, max_page_budget), -1, dtype=torch.int32)
    num_selected = torch.zeros((num_tokens, num_kv_heads), dtype=torch.int32)
    for row in rows_of(cu_query_lens, seq_lens, window):
        visible = row.visible_pages(page_size)
        budget = min(int(page_budget[row.sequence]), len(visible))
        forced = {
            page for page in visible if page < num_sink_pages or page >= visible.stop - num_recent_pages
        }
        for head in range(num_kv_heads):
            scores = page_scores[row.token, head].tolist()
            ranked = sorted((page not in forced, *_rank(scores[page]), page) for page in visible)
            chosen = sorted(page for *_, page in ranked[:budget])
            selected_pages[row.token, head, :budget] = torch.tensor(chosen, dtype=torch.int32)
            num_selected[row.token, head] = budget
    return selected_pages, num_selected


def _rank(score: float) -> tuple[bool, float]:
    """Sorts ascending from the best score to NaN."""
    return (True, 0.0) if math.isnan(score) else (False, -score)
