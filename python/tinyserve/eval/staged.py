"""The ablation "no fused op": scoring, selection and attention called one after the other from Python.

`ops.sparse_decode` equals its three parts bit for bit, so only the time of a step can differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from tinyserve_ops import ops

__all__ = ["staged_decode"]


@contextmanager
def staged_decode() -> Iterator[None]:
    """Within it, every sparse step of this process runs its three ops in place of the fused one."""
    fused = ops.sparse_decode
    ops.sparse_decode = _sparse_decode
    try:
        yield
    finally:
        ops.sparse_decode = fused


def _sparse_decode(
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
    """Arguments and results of `ops.sparse_decode`."""
    page_size = k_pages.size(2)
    rows = cu_query_lens, seq_lens
    scores = ops.score_pages(
        q, *rows, page_table, page_summary, page_size, scorer, group_reduction, sm_scale, window
    )
    selected, num_selected = ops.select_pages(
        scores, *rows, page_budget, max_page_budget, page_size, num_sink_pages, num_recent_pages, window
    )
    out, lse, _ = ops.attend_pages(
        q, *rows, page_table, k_pages, v_pages, k_scales, v_scales, selected, num_selected, sm_scale, window,
        softcap,
    )  # fmt: skip
    return out, lse, selected, num_selected
