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

from torch import Tensor

from tinyserve_ops.arguments import check_number
from tinyserve_ops.config import SparseConfig
from tinyserve_ops.policies.base import SelectionPolicy, TokenRows
from tinyserve_ops.policies.log_mass import check_log_mass, is_forced, keep_listed, page_shares

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
        check_log_mass(config, "policy soft_prune")

    def score(self, rows: TokenRows) -> Tensor:
        """Logarithm of each page's estimated mass, up to a constant of the row."""
        return rows.score_pages()

    def select(self, rows: TokenRows, page_scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best pages of the budget, less those that fail."""
        best, _ = rows.select_pages(page_scores)
        shares, has_estimate = page_shares(page_scores)
        passes = shares * has_estimate.sum(-1, keepdim=True) >= self.threshold
        passes = (passes | ~has_estimate).gather(-1, best.long().clamp(min=0))
        return keep_listed(best, passes | is_forced(rows, best))
