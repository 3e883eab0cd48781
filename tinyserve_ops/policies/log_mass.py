"""Pages by their estimated share of the attention, where page scores are logarithms of mass."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.base import TokenRows
from tinyserve_ops.scorers import find_op_scorer

__all__ = ["check_log_mass", "is_forced", "keep_listed", "page_shares"]

_NONE = torch.iinfo(torch.int32).max


def check_log_mass(config: SparseConfig, asker: str) -> None:
    """Raises ValueError unless the scores of a config's scorer are logarithms of mass.

    Args:
        asker: who needs that, e.g. "policy soft_prune".
    """
    scorer, _ = find_op_scorer(config.scorer, allow_public=True)
    if scorer.token_reduction != "logsumexp":
        raise ValueError(
            f"scorer: expected low_rank for {asker} (scores that are logarithms of mass), "
            f"got {config.scorer!r}"
        )
    if config.op_group_reduction != "softmax":
        raise ValueError(
            f"group_reduction: expected softmax for {asker} (the query heads' shares, added), "
            f"got {config.op_group_reduction!r}"
        )


def page_shares(page_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Estimated share of each page in the mass of those that have an estimate, and which have one: not an
    open page, one that is not seen, or one with NaN keys.

    Args:
        page_scores: [rows, num_kv_heads, max_pages].
    """
    has_estimate = page_scores.isfinite()
    return page_scores.masked_fill(~has_estimate, -torch.inf).softmax(-1), has_estimate


def is_forced(rows: TokenRows, pages: Tensor) -> Tensor:
    """Which pages of lists [rows, num_kv_heads, width] the config forces; nonsense where a list is padded."""
    last_page = (rows.seq_lens // rows.pool.page_size)[:, None, None]
    return (pages < rows.config.num_sink_pages) | (pages > last_page - rows.config.num_recent_pages)


def keep_listed(selected_pages: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
    """Lists without the pages that don't stay, and their lengths, as `ops.select_pages` returns them.

    Args:
        selected_pages: int32 [rows, num_kv_heads, width], ascending, -1 padded.
        stays: bool, likewise; not looked at where a list is padded.
    """
    stays = stays & (selected_pages >= 0)
    kept = selected_pages.masked_fill(~stays, _NONE).sort(-1).values
    return kept.masked_fill(kept == _NONE, -1), stays.sum(-1, dtype=torch.int32)
