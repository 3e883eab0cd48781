"""Pages chosen by the query and the page summaries of the config's scorer: what the library does without a
policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tinyserve_ops.policies.base import SelectionPolicy, TokenRows

__all__ = ["QueryAware"]


@dataclass(frozen=True, kw_only=True)
class QueryAware(SelectionPolicy):
    """Quest's selection (arXiv 2406.10774) with any scorer of the config; bit for bit the same as no policy.

    Steps of one token are sparse; several new tokens at once read everything.
    """

    name: ClassVar[str] = "query_aware"
    per_token: ClassVar[bool] = False
    fused: ClassVar[bool] = True
    reservable: ClassVar[bool] = True

    def score(self, rows: TokenRows) -> Tensor:
        """The scorer's estimates."""
        return rows.score_pages()
