"""The ops of a forward on the pool of one layer.

Called for every layer and token, so tensors are not looked at one by one, as `ops` does it: tables and pools
are the cache's own, and whoever calls has held q, k and v to `check_new`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinyserve_ops import ops

if TYPE_CHECKING:
    from tinyserve_ops.batch_parts import Rows
    from tinyserve_ops.config import SparseConfig
    from tinyserve_ops.layer_pool import LayerPool

__all__ = ["append_tokens", "attend_listed", "attend_sparse", "check_new"]


def check_new(pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError where q, k or v are not on the device of the pool, or would lose a gradient."""
    grad = torch.is_grad_enabled()
    if not grad and q.is_cpu and k.is_cpu and v.is_cpu and pool.k_pages.is_cpu:
        return  # as nearly always: one quick look
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device != pool.device:
            raise ValueError(f"{name}: expected a tensor on {pool.device}, got one on {tensor.device}")
        if grad and tensor.requires_grad:
            raise ValueError(f"{name}: {ops.NO_GRADIENT}")


def append_tokens(
    pool: LayerPool,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Writes the packed new keys and values of one layer into its pool. Arguments as for `ops.append_kv`."""
    op = ops.OPS.append_kv.default
    try:
        op(
            k,
            v,
            cu_query_lens,
            seq_lens,
            page_table,
            pool.k_pages,
            pool.v_pages,
            pool.k_scales,
            pool.v_scales,
            pool.page_summary,
            pool.scorer,
        )
    except RuntimeError as error:
        raise ops.translated(error) from None


def attend_sparse(
    q: torch.Tensor,
    cu_query_lens: torch.Tensor,
    rows: Rows,
    pool: LayerPool,
    config: SparseConfig,
    sm_scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of single-token rows over the pages that the scorer selects; the tokens are appended already.

    Args:
        q: [num_tokens, num_heads, head_dim].
        cu_query_lens: int32 [batch + 1].
        rows: `seq_lens`, `page_table`, `page_budget`, `max_page_budget` of the batch.

    Returns:
        The output like `q`, `selected_pages` and `num_selected`.
    """
    seq_lens, page_table, page_budget, max_page_budget = rows
    op = ops.OPS.sparse_decode.default
    try:
        out, _, selected_pages, num_selected = op(
            q,
            cu_query_lens,
            seq_lens,
            page_table,
            pool.k_pages,
            pool.v_pages,
            pool.k_scales,
            pool.v_scales,
            pool.page_summary,
            page_budget,
            max_page_budget,
            pool.scorer,
            config.op_group_reduction,
            sm_scale,
            config.num_sink_pages,
            config.num_recent_pages,
            window,
            softcap,
        )
    except RuntimeError as error:
        raise ops.translated(error) from None
    return out, selected_pages, num_selected


def attend_listed(
    q: torch.Tensor,
    cu_query_lens: torch.Tensor,
    rows: Rows,
    pool: LayerPool,
    selected_pages: torch.Tensor | None,
    num_selected: torch.Tensor | None,
    sm_scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of appended tokens over lists of pages, or over everything (None, None).

    Returns:
        The output like `q`, and lse fp32 [num_tokens, num_heads].
    """
    op = ops.OPS.attend_pages.default
    try:
        out, lse, _ = op(
            q,
            cu_query_lens,
            rows[0],
            rows[1],
            pool.k_pages,
            pool.v_pages,
            pool.k_scales,
            pool.v_scales,
            selected_pages,
            num_selected,
            sm_scale,
            window,
            softcap,
            False,
        )
    except RuntimeError as error:
        raise ops.translated(error) from None
    return out, lse
