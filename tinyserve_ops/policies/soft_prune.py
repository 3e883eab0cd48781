"""Pages whose estimated share of the attention passes a threshold: as many as matter, up to the budget.

The TinyServe paper names a SoftPrune baseline with a threshold of 0.1 and defines it nowhere; this is the
definition here. With s_j the score of page j, an estimate of the logarithm of its softmax mass, and n the
sealed pages that a token sees, its estimated share is

    share_j = exp(s_j) / sum over sealed pages of exp(s_i)

and the page is read when share_j >= threshold / n: when it is expected to get at least `threshold` times what
it would get if all pages mattered alike. So the pages that fail hold less than `threshold` of the estimated
mass together. Forced pages are read in any case. If more pages pass than the budget holds, the best of them
are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tinyserve_ops.arguments import check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.base import SelectionPolicy, TokenRows
from tinyserve_ops.scorers import find_op_scorer

__all__ = ["SoftPrune"]


@dataclass(frozen=True, kw_only=True)
class SoftPrune(SelectionPolicy):
    """Reads the pages whose estimated share is at least `threshold` times the average one.

    Shares need scores that are logarithms of mass: scorer `low_rank` (any rank) with the group reduction
    `softmax`. `keep_ratio=1.0` sets no limit but the threshold.

    Args:
        threshold: 0 reads everything up to the budget, 1 the pages above the average.
    """

    name: ClassVar[str] = "soft_prune"
    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0.0, 1e9)

    def check(self, config: SparseConfig) -> None:
        """The scorer must estimate masses."""
        scorer, _ = find_op_scorer(config.scorer, allow_public=True)
        if scorer.token_reduction != "logsumexp":
            raise ValueError(
                "scorer: expected low_rank for policy soft_prune (scores that are logarithms of mass), "
                f"got {config.scorer!r}"
            )
        if config.op_group_reduction != "softmax":
            raise ValueError(
                "group_reduction: expected softmax for policy soft_prune (the query heads' shares, added), "
                f"got {config.op_group_reduction!r}"
            )

    def score(self, rows: TokenRows) -> Tensor:
        """Logarithm of each page's estimated mass, up to a constant of the row."""
        return rows.score_pages()

    def select(self, rows: TokenRows, page_scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best pages of the budget, less those that fail."""
        best, _ = rows.select_pages(page_scores)
        has_estimate = page_scores.isfinite()  # not an open page, one that is not seen, or one with NaN keys
        shares = page_scores.masked_fill(~has_estimate, -torch.inf).softmax(-1)
        passes = shares * has_estimate.sum(-1, keepdim=True) >= self.threshold
        last_page = (rows.seq_lens // rows.pool.page_size)[:, None, None]
        forced = (best < rows.config.num_sink_pages) | (best > last_page - rows.config.num_recent_pages)
        index = best.long().clamp(min=0)
        passes = (passes | ~has_estimate).gather(-1, index) | forced
        passes &= best >= 0
        none = torch.iinfo(torch.int32).max
        selected_pages = best.masked_fill(~passes, none).sort(-1).values
        return selected_pages.masked_fill(selected_pages == none, -1), passes.sum(-1, dtype=torch.int32)
